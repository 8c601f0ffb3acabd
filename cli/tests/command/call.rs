//! `call` and `load`: calls of a service that the command knows only by reflection, over each transport.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::process::Output;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::task::{Context, Poll};
use std::time::Duration;

use prost_reflect::prost_types::field_descriptor_proto::{Label, Type};
use prost_reflect::prost_types::{
    DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet, MessageOptions,
    MethodDescriptorProto, ServiceDescriptorProto,
};
use serde_json::{Value, json};
use tokio_stream::{Stream, StreamExt as _};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{NamedService, StreamingService};
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::{RdmaIncoming, RdmaServer};

use super::process::{refused, run, tonic_rdma};

const PROTO: &str = r#"
syntax = "proto3";
package test.sums;

service Sums {
  rpc Add(Item) returns (Sum);
  rpc Collect(stream Item) returns (Sum);
  rpc Count(Item) returns (stream Sum);
  rpc Running(stream Item) returns (stream Sum);
}

enum Colour {
  UNKNOWN = 0;
  RED = 1;
  GREEN = 2;
}

message Item {
  int64 value = 1;
  string name = 2;
  Colour colour = 3;
  Item inner = 4;
  repeated Item items = 5;
  map<string, int32> counts = 6;
  oneof either {
    bool yes = 7;
    bytes data = 8;
  }
}

message Sum {
  int64 total = 1;
  string seen = 2;
}
"#;

/// The part of the messages that the server uses.
#[derive(Clone, PartialEq, prost::Message)]
struct Item {
    #[prost(int64, tag = "1")]
    value: i64,
    #[prost(string, tag = "2")]
    name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Sum {
    #[prost(int64, tag = "1")]
    total: i64,
    #[prost(string, tag = "2")]
    seen: String,
}

/// The service. A name says what goes wrong.
#[derive(Clone, Debug)]
struct Sums(Arc<AtomicU64>);

impl NamedService for Sums {
    const NAME: &'static str = "test.sums.Sums";
}

const NAP: Duration = Duration::from_millis(5);

/// A method: on the wire all four kinds are alike.
#[derive(Clone, Debug)]
struct Method {
    name: String,
    calls: Arc<AtomicU64>,
}

type Sent = Pin<Box<dyn Stream<Item = Result<Sum, Status>> + Send>>;

impl StreamingService<Item> for Method {
    type Response = Sum;
    type ResponseStream = Sent;
    type Future = BoxFuture<Response<Sent>, Status>;

    fn call(&mut self, request: Request<Streaming<Item>>) -> Self::Future {
        let (name, number) = (self.name.clone(), self.calls.fetch_add(1, Ordering::Relaxed));
        Box::pin(async move {
            let seen = request.metadata().get("x-id").map(|id| id.to_str().unwrap().to_owned());
            let seen = seen.unwrap_or_default();
            let mut items = request.into_inner();
            let mut sums = Vec::new();
            let mut total = 0;
            while let Some(item) = items.next().await.transpose()? {
                match item.name.as_str() {
                    "fail" => return Err(Status::not_found("no such item")),
                    "each third" if number % 3 == 0 => return Err(Status::resource_exhausted("come again")),
                    "nap" => tokio::time::sleep(NAP).await,
                    "slow" => tokio::time::sleep(Duration::from_secs(600)).await,
                    _ => {}
                }
                total += item.value;
                sums.push(Sum { total, seen: seen.clone() });
            }
            let sums = match name.as_str() {
                "Running" => sums,
                "Count" => (1..=total).map(|total| Sum { total, seen: seen.clone() }).collect(),
                _ => vec![Sum { total, seen }],
            };
            let sums: Sent = Box::pin(tokio_stream::iter(sums.into_iter().map(Ok)));
            Ok(Response::new(sums))
        })
    }
}

impl Service<http::Request<Body>> for Sums {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<http::Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let name = request.uri().path().rsplit('/').next().unwrap().to_owned();
        let method = Method { name, calls: Arc::clone(&self.0) };
        Box::pin(async move {
            let codec = tonic_prost::ProstCodec::<Sum, Item>::default();
            Ok(tonic::server::Grpc::new(codec).streaming(method, request).await)
        })
    }
}

/// The descriptors of the service, encoded.
fn descriptors() -> &'static [u8] {
    static SET: OnceLock<Vec<u8>> = OnceLock::new();
    SET.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("sums.proto"), PROTO).unwrap();
        prost::Message::encode_to_vec(&protox::compile(["sums.proto"], [folder.path()]).unwrap())
    })
}

/// What a server offers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Offer {
    Native,
    DropIn,
    Tcp,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Reflection {
    V1,
    V1Alpha,
    None,
}

/// Runs a server in a thread that lives as long as the test. Returns its address, and the number of calls.
fn serve(offer: Offer, reflection: Reflection) -> (String, Arc<AtomicU64>) {
    let calls = Arc::new(AtomicU64::new(0));
    let mut routes = Routes::new(Sums(Arc::clone(&calls)));
    let builder =
        || tonic_reflection::server::Builder::configure().register_encoded_file_descriptor_set(descriptors());
    routes = match reflection {
        Reflection::V1 => routes.add_service(builder().build_v1().unwrap()),
        Reflection::V1Alpha => routes.add_service(builder().build_v1alpha().unwrap()),
        Reflection::None => routes,
    };
    let (sender, address) = mpsc::channel::<SocketAddr>();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let http2 = Server::builder();
            if offer == Offer::Tcp {
                let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
                sender.send(incoming.local_addr().unwrap()).unwrap();
                return http2.clone().add_routes(routes).serve_with_incoming(incoming).await.unwrap();
            }
            let incoming = RdmaIncoming::bind("127.0.0.1:0").await.unwrap();
            sender.send(incoming.local_addr()).unwrap();
            match offer {
                Offer::Native => {
                    RdmaServer::new().add_routes(routes).serve_with_incoming(incoming).await.unwrap()
                }
                _ => http2.clone().add_routes(routes).serve_with_incoming(incoming).await.unwrap(),
            }
        });
    });
    (address.recv().unwrap().to_string(), calls)
}

/// Returns the answers that a call which must succeed has printed.
fn answers(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::Deserializer::from_slice(&output.stdout).into_iter().map(Result::unwrap).collect()
}

/// Runs a load. Returns its JSON, its exit status and what it said on stderr.
fn load(arguments: &[&str]) -> (Value, i32, String) {
    let output = run(&[&["load", "--json", "-"], arguments].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let json = serde_json::from_slice(&output.stdout);
    (json.unwrap_or_else(|_| panic!("{said}")), output.status.code().unwrap(), said)
}

#[test]
fn each_kind_of_method_is_called_over_each_transport() {
    let (server, calls) = serve(Offer::Native, Reflection::V1);
    let mut made = 0;
    for transport in ["auto", "tcp", "drop-in", "native"] {
        for (method, data, expected) in [
            (
                "test.sums.Sums/Add",
                r#"{"value": 7, "colour": "RED", "counts": {"a": 1}, "data": "AAE="}"#,
                json!([{"total": "7"}]),
            ),
            ("Sums/Collect", r#"{"value": 7} {"value": "8"}"#, json!([{"total": "15"}])),
            ("/test.sums.Sums/Count", r#"{"value": 2}"#, json!([{"total": "1"}, {"total": "2"}])),
            (
                "test.sums.Sums.Running",
                r#"[{"value": 1}, {"value": 2}]"#,
                json!([{"total": "1"}, {"total": "3"}]),
            ),
        ] {
            let output = run(&["call", &server, method, "-d", data, "--transport", transport]);
            assert_eq!(Value::from(answers(&output)), expected, "{method} over {transport}");
            assert!(output.stderr.is_empty(), "{output:?}");
            made += 1;
            assert_eq!(calls.load(Ordering::Relaxed), made);
        }
    }
    // Without data: one empty message, or an empty stream.
    assert_eq!(answers(&run(&["call", &server, "Sums/Add"])), [json!({})]);
    assert!(answers(&run(&["call", &server, "Sums/Running"])).is_empty());
}

#[test]
fn data_comes_from_a_file_or_stdin_and_headers_go_along() {
    let (server, _) = serve(Offer::Native, Reflection::V1);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("items.json");
    std::fs::write(&file, "{\"value\": 4}\n{\"value\": 5}\n").unwrap();
    let at_file = format!("@{}", file.display());
    assert_eq!(answers(&run(&["call", &server, "Sums/Collect", "-d", &at_file])), [json!({"total": "9"})]);
    for stdin in ["@-", "@"] {
        let mut command = tonic_rdma(&["call", &server, "Sums/Collect", "-d", stdin]);
        let output = command.stdin(std::fs::File::open(&file).unwrap()).output().unwrap();
        assert_eq!(answers(&output), [json!({"total": "9"})]);
    }
    let output = run(&["call", &server, "Sums/Add", "-H", "X-Id: seven", "-v"]);
    assert_eq!(answers(&output), [json!({"seen": "seven"})]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.contains("transport: native calls over RDMA (soft0)") && said.contains("header: "),
        "{said}"
    );
}

#[test]
fn descriptors_come_from_either_version_of_reflection_or_from_a_file() {
    for offer in [Offer::Native, Offer::DropIn, Offer::Tcp] {
        let (server, _) = serve(offer, Reflection::V1Alpha);
        assert_eq!(
            answers(&run(&["call", &server, "Sums/Add", "-d", r#"{"value": 1}"#])),
            [json!({"total": "1"})]
        );
        let (server, _) = serve(offer, Reflection::None);
        refused(
            &run(&["call", &server, "Sums/Add"]),
            1,
            &["no reflection", "v1alpha", "--descriptor-set FILE"],
        );
        let folder = tempfile::tempdir().unwrap();
        let set = folder.path().join("set.bin");
        std::fs::write(&set, descriptors()).unwrap();
        let with_file = ["--descriptor-set", set.to_str().unwrap()];
        let arguments = ["call", &server, "Sums/Add", "-d", r#"{"value": 1}"#];
        assert_eq!(answers(&run(&[&arguments[..], &with_file].concat())), [json!({"total": "1"})]);
        let (report, status, said) = load(&[&[&server, "Sums/Add", "--total", "3"][..], &with_file].concat());
        assert_eq!((report["rows"][0]["ops"].as_u64(), status), (Some(3), 0), "{said}");
    }
}

#[test]
fn methods_are_listed_and_described() {
    let (server, _) = serve(Offer::Native, Reflection::V1);
    let text = |arguments: &[&str]| {
        let output = run(&[&["call", &server], arguments].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let listed = text(&["--list"]);
    for line in [
        "test.sums.Sums/Add(test.sums.Item) returns (test.sums.Sum)",
        "test.sums.Sums/Collect(stream test.sums.Item) returns (test.sums.Sum)",
        "test.sums.Sums/Running(stream test.sums.Item) returns (stream test.sums.Sum)",
    ] {
        assert!(listed.lines().any(|listed| listed == line), "{listed}");
    }
    assert!(listed.contains("grpc.reflection.v1.ServerReflection/"), "{listed}");
    assert_eq!(text(&["Sums", "--list"]).lines().count(), 4);
    let described = text(&["Sums/Count", "--describe"]);
    for line in [
        "test.sums.Sums/Count(test.sums.Item) returns (stream test.sums.Sum)",
        "message test.sums.Item {",
        "  int64 value = 1;",
        "  map<string, int32> counts = 6;",
        "  repeated test.sums.Item items = 5;",
        "  bool yes = 7; // of oneof either",
        "enum test.sums.Colour {",
        "  GREEN = 2;",
        "message test.sums.Sum {",
    ] {
        assert!(described.lines().any(|described| described == line), "{line:?} is not in {described}");
    }
    assert!(!described.contains("Sums/Add"), "{described}");
    // What it says about -d is accepted.
    let example = described.lines().find_map(|line| line.trim().strip_prefix("-d '")).unwrap();
    assert!(example.contains("\"colour\":\"UNKNOWN\""), "{example}");
    answers(&run(&["call", &server, "Sums/Count", "-d", example.trim_end_matches('\'')]));
    assert!(text(&["--describe"]).contains("Sums/Add"));
}

/// Writes the descriptors of a service `a.S` with a method `M`, which takes and returns the first of `messages`.
/// Returns the path.
fn write_descriptors(folder: &Path, messages: Vec<DescriptorProto>) -> String {
    let kind = Some(format!(".a.{}", messages[0].name()));
    let method = MethodDescriptorProto {
        name: Some("M".to_owned()),
        input_type: kind.clone(),
        output_type: kind,
        ..Default::default()
    };
    let service =
        ServiceDescriptorProto { name: Some("S".to_owned()), method: vec![method], ..Default::default() };
    let file = FileDescriptorProto {
        name: Some("a.proto".to_owned()),
        package: Some("a".to_owned()),
        syntax: Some("proto3".to_owned()),
        message_type: messages,
        service: vec![service],
        ..Default::default()
    };
    let path = folder.join("set.bin");
    let set = FileDescriptorSet { file: vec![file] };
    std::fs::write(&path, prost_reflect::prost::Message::encode_to_vec(&set)).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Returns a message with these fields: name, number, and the message that it is or a scalar.
fn message(name: &str, fields: &[(&str, i32, Result<&str, Type>)]) -> DescriptorProto {
    let field = |(name, number, kind): &(&str, i32, Result<&str, Type>)| FieldDescriptorProto {
        name: Some((*name).to_owned()),
        number: Some(*number),
        label: Some(Label::Optional.into()),
        r#type: Some(kind.err().unwrap_or(Type::Message).into()),
        type_name: kind.ok().map(|message| format!(".a.{message}")),
        ..Default::default()
    };
    let field = fields.iter().map(field).collect();
    DescriptorProto { name: Some(name.to_owned()), field, ..Default::default() }
}

#[test]
fn a_long_chain_of_messages_is_described() {
    let folder = tempfile::tempdir().unwrap();
    let last = 20_000;
    let link = |index| {
        let next = format!("M{}", index + 1);
        let fields = [("next", 1, Ok(next.as_str()))];
        message(&format!("M{index}"), if index < last { &fields } else { &[] })
    };
    let set = write_descriptors(folder.path(), (0..=last).map(link).collect());
    // `run` would keep only the end of so much output.
    let mut command = tonic_rdma(&["call", "localhost:1", "a.S/M", "--describe", "--descriptor-set", &set]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut described = text.lines().filter_map(|line| line.strip_prefix("message "));
    for index in 0..=last {
        assert_eq!(described.next(), Some(format!("a.M{index} {{").as_str()));
    }
    assert_eq!(described.next(), None);
}

#[test]
fn bad_maps_of_descriptors_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (key, value) = (("key", 1, Err(Type::String)), ("value", 2, Err(Type::Int32)));
    for (fields, accepted) in [
        (&[key, value][..], true),
        (&[key], false),
        (&[value], false),
        (&[("key", 1, Err(Type::Double)), value], false),
    ] {
        let mut entry = message("Entry", fields);
        entry.options = Some(MessageOptions { map_entry: Some(true), ..Default::default() });
        let mut item = message("Item", &[("entries", 1, Ok("Item.Entry"))]);
        item.field[0].set_label(Label::Repeated);
        item.nested_type.push(entry);
        let set = write_descriptors(folder.path(), vec![item]);
        let output = run(&["call", "localhost:1", "a.S/M", "--describe", "--descriptor-set", &set]);
        match accepted {
            true => assert!(
                String::from_utf8_lossy(&output.stdout).contains("map<string, int32> entries"),
                "{output:?}"
            ),
            false => refused(&output, 2, &["--descriptor-set", "a.proto: Entry is no entry of a map"]),
        }
    }
}

#[test]
fn bad_input_is_named_before_a_call_is_made() {
    let (server, calls) = serve(Offer::Native, Reflection::V1);
    let item = |data| vec!["Sums/Add", "-d", data];
    for (arguments, named) in [
        (vec!["Smus/Add"], &["no service \"Smus\"", "test.sums.Sums, "][..]),
        (vec!["test.sums.Sumz/Add"], &["did you mean test.sums.Sums?"]),
        (
            vec!["Sums/add"],
            &[
                "test.sums.Sums has no method \"add\"",
                "did you mean Add? accepted: Add, Collect, Count, Running",
            ],
        ),
        (vec!["Sums"], &["\"Sums\" is no method", "SERVICE/METHOD", "--list"]),
        (
            item(r#"{"valeu": 1}"#),
            &["test.sums.Item has no field \"valeu\"", "did you mean value?", "accepted: value, name, "],
        ),
        (item(r#"{"value": "x"}"#), &["field \"value\" takes int64"]),
        (item(r#"{"value": 1.5}"#), &["field \"value\" takes int64"]),
        (item(r#"{"inner": {"items": [{}, {"name": 5}]}}"#), &["field \"inner.items[1].name\" takes string"]),
        (item(r#"{"inner": {"itmes": []}}"#), &["no field \"inner.itmes\"", "did you mean items?"]),
        (item(r#"{"inner": 5}"#), &["field \"inner\"", "5 is no test.sums.Item"]),
        (item(r#"{"items": {}}"#), &["field \"items\" takes repeated test.sums.Item"]),
        (
            item(r#"{"colour": "GREAN"}"#),
            &["field \"colour\" takes test.sums.Colour (UNKNOWN, RED, GREEN; did you mean GREEN?)"],
        ),
        (item(r#"{"counts": {"a": "x"}}"#), &["field \"counts\" takes map<string, int32>"]),
        (item(r#"{"data": "?"}"#), &["field \"data\" takes bytes", "base64"]),
        (item(r#"{"yes": true, "data": ""}"#), &["test.sums.Item", "either"]),
        (item("5"), &["5 is no test.sums.Item"]),
        (item("{value: 1}"), &["-d: value 1 is no JSON", "line 1 column 2"]),
        (item("{} {"), &["-d: value 2 is no JSON"]),
        (item("{} {}"), &["test.sums.Sums.Add takes one message, and there are 2"]),
        (item(""), &["test.sums.Sums.Add takes a message; {} is one"]),
        (item("@/no/such/file"), &["-d @/no/such/file: can't be read"]),
        (vec!["Sums/Add", "-H", "x-id"], &["--header", "x-id", "'name: value'"]),
        (vec!["Sums/Add", "-H", "grpc-timeout: 1S"], &["grpc-timeout is gRPC's own", "--deadline"]),
        (vec!["Sums/Add", "-H", "x-bin: ???"], &["x-bin is not base64"]),
        (vec!["Sums/Add", "--deadline", "soon"], &["--deadline", "soon", "300ms"]),
        (vec!["Sums/Add", "--transport", "quic"], &["quic", "auto, tcp, drop-in, native"]),
        (
            vec!["Sums/Add", "--descriptor-set", "/no/such/file"],
            &["--descriptor-set: /no/such/file can't be read"],
        ),
        (
            vec!["Sums/Add", "--descriptor-set", "/etc/hostname"],
            &["no complete set of descriptors", "--include_imports"],
        ),
        (vec![], &["not provided", "SERVICE/METHOD"]),
        (vec!["Sums/Add", "--list", "--describe"], &["--list", "--describe"]),
    ] {
        refused(&run(&[&["call", &server], &arguments[..]].concat()), 2, named);
    }
    for (arguments, named) in [
        (
            &["Sums/Add", "--check", "{} {}"][..],
            &["--check: test.sums.Sums.Add gives one answer; accepted: 1 value, not 2"][..],
        ),
        (&["Sums/Add", "--check", ""], &["--check: there is no value"]),
        (
            &["Sums/Add", "--check", r#"{"toatl": 1}"#],
            &["--check: test.sums.Sum has no field \"toatl\"; did you mean total?"],
        ),
        (
            &["Sums/Add", "--transport", "auto"],
            &["unknown transport \"auto\"; accepted: tcp, drop-in, native"],
        ),
        (&["Sums/Add", "--transport", "tcp,tcp"], &["tcp", "twice"]),
        (&["Sums/Add", "--total", "0"], &["--total", "from 1 to 1000000000"]),
        (&["Sums/Add", "--total", "5", "--duration", "1"], &["--total", "--duration"]),
        (&["Sums/Add", "--rate", "fast"], &["--rate", "fast", "0.1 to 1000000"]),
        (&["Sums/Add", "--inflight", "0"], &["--inflight", "from 1 to 16384"]),
        (&["Sums/Add", "--connections", "1001"], &["--connections", "from 1 to 1000"]),
        (&["Sums/Add", "--runs", "0"], &["--runs", "from 1 to 99"]),
        (&["Sums/Add", "--runtime", "threads"], &["--runtime", "multi-thread"]),
        (&["Sums/Add", "--json", "/no/such/folder/x"], &["--json", "/no/such/folder/x"]),
        (&["Sums/Sub"], &["no method \"Sub\""]),
        (&[], &["not provided", "SERVICE/METHOD"]),
    ] {
        refused(&run(&[&["load", &server], arguments].concat()), 2, named);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    for (url, named) in [
        ("https://localhost:1", "no certificates for https"),
        ("localhost", "HOST:PORT, or http://HOST:PORT"),
        ("unix:///tmp/x", "HOST:PORT"),
    ] {
        refused(&run(&["call", url, "--list"]), 2, &[url, named]);
        refused(&run(&["load", url, "a/b"]), 2, &[url, named]);
    }
}

#[test]
fn a_call_that_fails_shows_its_status() {
    let (server, _) = serve(Offer::Native, Reflection::V1);
    for transport in ["tcp", "drop-in", "native"] {
        let call = |data, more: &[&str]| {
            run(&[&["call", &server, "Sums/Add", "-d", data, "--transport", transport], more].concat())
        };
        refused(&call(r#"{"name": "fail"}"#, &[]), 1, &["test.sums.Sums.Add: NOT_FOUND: no such item"]);
        let late = call(r#"{"name": "slow"}"#, &["--deadline", "500ms"]);
        refused(&late, 1, &["test.sums.Sums.Add: DEADLINE_EXCEEDED: "]);
    }
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    refused(&run(&["call", &free, "--list"]), 1, &["can't connect", &free]);
    refused(&run(&["load", &free, "a/b"]), 1, &["can't connect", &free]);
}

#[test]
fn a_call_that_goes_another_way_says_so() {
    let (server, _) = serve(Offer::Tcp, Reflection::V1);
    for transport in ["drop-in", "native"] {
        let output = run(&["call", &server, "Sums/Add", "--transport", transport]);
        assert_eq!(answers(&output), [json!({})]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let warning = format!("WARNING: --transport {transport}: the call went by HTTP/2 over TCP, because ");
        assert!(said.starts_with(&warning), "{said}");
    }
    let (server, _) = serve(Offer::DropIn, Reflection::V1);
    let said = run(&["call", &server, "Sums/Add", "--transport", "native"]).stderr;
    assert!(String::from_utf8_lossy(&said).contains("went by HTTP/2 over RDMA (soft0), because"), "{said:?}");
}

#[test]
fn a_load_makes_exactly_the_calls_that_were_asked_for() {
    let (server, calls) = serve(Offer::Native, Reflection::V1);
    for (arguments, runs) in [
        (&["--inflight", "7", "--connections", "3"][..], 1),
        (&["--inflight", "1", "--runtime", "idle-polling"], 1),
        (&["--rate", "5000", "--inflight", "16"], 1),
        (&["--runs", "2", "--runtime", "current-thread"], 2),
    ] {
        calls.store(0, Ordering::Relaxed);
        let common =
            [&server, "Sums/Add", "-d", r#"{"value": 3}"#, "--check", r#"{"total": 3}"#, "--total", "203"];
        let (report, status, said) = load(&[&common, arguments].concat());
        assert_eq!(status, 0, "{said}");
        let rows = report["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 3);
        for (row, mode) in rows.iter().zip(["tcp", "drop-in", "native"]) {
            assert_eq!((&row["mode"], &row["ops"]), (&mode.into(), &(203 * runs).into()), "{row}");
            assert_eq!((&row["errors"], &row["went"][0]), (&0.into(), &mode.into()), "{row}");
            assert_eq!(row["bytes"], 2, "{row}");
            for figure in
                ["p50_us", "p99_us", "ops_per_s", "cpu_us_per_op", "latency_ratio", "throughput_ratio"]
            {
                assert!(row[figure].as_f64() > Some(0.0), "{figure}: {row}");
            }
            assert_eq!(row["unsent"].as_u64(), arguments.contains(&"--rate").then_some(0), "{row}");
            let each = row["p50_us_runs"].as_array().map_or(1, Vec::len);
            assert_eq!(each as u64, runs, "{row}");
        }
        assert_eq!((&rows[0]["latency_ratio"], rows.len()), (&1.0.into(), 3));
        assert_eq!(calls.load(Ordering::Relaxed), 3 * 203 * runs, "no other call is made");
        assert_eq!(other_ways(&report), 0, "{report}");
        assert!(!said.contains("WARNING"), "{said}");
    }
}

#[test]
fn a_load_lasts_as_long_as_asked_for_and_takes_all_kinds_of_methods() {
    let (server, _) = serve(Offer::Native, Reflection::V1);
    for (method, data, check) in [
        ("Sums/Add", r#"{"value": 1} {"value": 2}"#, r#"{"total": 1} {"total": "2"}"#),
        ("Sums/Collect", r#"{"value": 1} {"value": 2}"#, r#"{"total": 3}"#),
        ("Sums/Count", r#"{"value": 2}"#, r#"{"total": 1} {"total": 2}"#),
        ("Sums/Running", r#"{"value": 1} {"value": 2}"#, r#"[{"total": 1}, {"total": 3}]"#),
    ] {
        let (report, status, said) = load(&[
            &server,
            method,
            "-d",
            data,
            "--check",
            check,
            "--duration",
            "200ms",
            "--inflight",
            "1,4",
        ]);
        assert_eq!((status, report["rows"].as_array().unwrap().len()), (0, 6), "{said}");
        for row in report["rows"].as_array().unwrap() {
            assert!(row["ops"].as_u64() > Some(0) && row["errors"] == 0, "{row}");
        }
    }
}

#[test]
fn latency_is_the_time_of_a_call_and_counts_from_when_it_was_due_at_a_rate() {
    let (server, _) = serve(Offer::Native, Reflection::V1);
    let common = [&server, "Sums/Add", "-d", r#"{"name": "nap"}"#, "--inflight", "1", "--total", "200"];
    let nap = NAP.as_secs_f64() * 1e6;
    let (report, status, said) = load(&common);
    assert_eq!(status, 0, "{said}");
    for row in report["rows"].as_array().unwrap() {
        let [p50, p99] = ["p50_us", "p99_us"].map(|figure| row[figure].as_f64().unwrap());
        let [each, cpu] = [1e6 / row["ops_per_s"].as_f64().unwrap(), row["cpu_us_per_op"].as_f64().unwrap()];
        assert!(nap <= p50 && p50 <= p99 && p50 <= 2.0 * each && cpu < 1e9, "{row}");
    }
    // Of the 20 calls of each trial, which are due within 20 ms, one is made after the other.
    let (report, status, said) = load(&[&common[..], &["--rate", "1000", "--transport", "native"]].concat());
    assert_eq!((status, report["rows"][0]["unsent"].as_u64()), (0, Some(0)), "{said}");
    assert!(report["rows"][0]["p50_us"].as_f64() > Some(5.0 * nap), "{report}");
}

#[test]
fn a_load_keeps_to_its_rate() {
    let (server, _) = serve(Offer::Native, Reflection::V1);
    let (report, status, said) = load(&[&server, "Sums/Add", "--rate", "3,25", "--duration", "1"]);
    assert_eq!(status, 0, "{said}");
    for row in report["rows"].as_array().unwrap() {
        let rate = row["rate"].as_f64().unwrap();
        assert_eq!(row["ops"].as_f64(), Some(rate), "as many calls as are due in a second: {row}");
        // A slow machine makes fewer in a second, and none makes more.
        assert!(row["ops_per_s"].as_f64().unwrap() <= rate, "{row}");
    }
}

#[test]
fn calls_that_were_given_up_are_a_failure() {
    let (server, _) = serve(Offer::Native, Reflection::V1);
    // One after the other, 500 naps take 2.5 s, and each call has to begin within a second.
    let naps = ["-d", r#"{"name": "nap"}"#, "--inflight", "1", "--deadline", "1", "--transport", "native"];
    let rate = ["--rate", "10000", "--duration", "50ms"];
    let (report, status, said) = load(&[&[&server, "Sums/Add"][..], &naps, &rate].concat());
    let unsent = report["rows"][0]["unsent"].as_u64().unwrap();
    assert!(unsent > 0 && status == 1, "{said}");
    assert!(
        said.contains("native with 10000 calls/s: ")
            && said.contains(&format!("{unsent} calls were given up")),
        "{said}"
    );
}

#[test]
fn errors_of_a_load_are_counted_by_status_and_have_no_latency() {
    let (server, calls) = serve(Offer::Native, Reflection::V1);
    let total = ["--total", "30"];
    let (report, status, said) =
        load(&[&[&server, "Sums/Add", "-d", r#"{"name": "each third"}"#][..], &total].concat());
    assert_eq!((status, calls.load(Ordering::Relaxed)), (1, 90), "{said}");
    for row in report["rows"].as_array().unwrap() {
        assert_eq!((&row["ops"], &row["errors"]), (&20.into(), &10.into()), "{row}");
        assert_eq!(row["statuses"], json!({"RESOURCE_EXHAUSTED": 10}), "{row}");
        assert!(row["first_error"].as_str().unwrap().contains("come again"), "{row}");
    }
    assert!(
        said.contains(
            "native with 1 in flight: 10 RESOURCE_EXHAUSTED, the first: RESOURCE_EXHAUSTED: come again"
        ),
        "{said}"
    );

    for (data, more, name) in [
        (r#"{"value": 1}"#, &["--check", r#"{"total": 2}"#][..], "WRONG_ANSWER"),
        (r#"{"name": "fail"}"#, &["--rate", "1000"], "NOT_FOUND"),
        (r#"{"name": "slow"}"#, &["--deadline", "20ms", "--inflight", "10"], "DEADLINE_EXCEEDED"),
    ] {
        let (report, status, said) = load(&[&[&server, "Sums/Add", "-d", data][..], more, &total].concat());
        assert_eq!(status, 1, "{said}");
        for row in report["rows"].as_array().unwrap() {
            assert_eq!(
                (&row["ops"], &row["errors"], &row["statuses"]),
                (&0.into(), &30.into(), &json!({name: 30})),
                "{row}"
            );
            assert!(
                row["p50_us"].is_null() && row["cpu_us_per_op"].is_null() && row["latency_ratio"].is_null(),
                "{row}"
            );
        }
    }
    let (_, status, said) =
        load(&[&server, "Sums/Count", "-d", r#"{"value": 3}"#, "--check", r#"{"total": 1}"#, "-n", "1"]);
    assert!(status == 1 && said.contains("WRONG_ANSWER"), "{said}");
}

/// Returns how many warnings of a report name a transport whose calls went another way. A busy machine adds
/// warnings of its own.
fn other_ways(report: &Value) -> usize {
    let warnings = report.get("warnings").and_then(Value::as_array);
    let name = |warning: &&Value| warning.as_str().unwrap().contains(": its calls went by ");
    warnings.map_or(0, |warnings| warnings.iter().filter(name).count())
}

#[test]
fn a_load_that_goes_another_way_says_so_loudly() {
    let (server, _) = serve(Offer::Tcp, Reflection::V1);
    let (report, status, said) = load(&[&server, "Sums/Add", "--total", "5"]);
    assert_eq!(status, 0, "{said}");
    for (row, mode) in report["rows"].as_array().unwrap().iter().zip(["tcp", "drop-in", "native"]) {
        assert_eq!((&row["mode"], &row["went"][0]), (&mode.into(), &"tcp".into()), "{row}");
        let warns = said.contains(&format!("WARNING: {mode}: its calls went by tcp, because "));
        assert_eq!(warns, mode != "tcp", "{said}");
    }
    assert_eq!(other_ways(&report), 2, "{report}");
    let csv = run(&["load", &server, "Sums/Add", "--total", "5", "--csv"]).stdout;
    let csv = String::from_utf8(csv).unwrap();
    assert!(csv.lines().count() == 4 && csv.starts_with("mode,bytes,inflight,ops,errors,"), "{csv}");

    let (server, _) = serve(Offer::Native, Reflection::V1);
    let mut command = tonic_rdma(&["load", &server, "Sums/Add", "--total", "5", "--transport", "native"]);
    let output = command.env("RDMA_POLICY", "tcp-only").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("WARNING: native: its calls went by tcp, because"), "{said}");
}
