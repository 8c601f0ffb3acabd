//! `call` and `load`: calls of the user's own service, over TCP, HTTP/2 over RDMA and native calls. A message
//! is JSON on the command line; its type comes from the server by gRPC reflection, or from a file of
//! descriptors.
//!
//! ```text
//!   channel   connections over each transport, what they really are, calls of encoded messages
//!   service   descriptors: reflection, files; lists and descriptions for people
//!   message   JSON to messages and back
//!   load      many calls in a closed or an open loop over each transport, side by side
//! ```
//!
//! This module never encodes a message during a load, and never decodes one whose bytes are known.

pub(crate) mod channel;
pub(crate) mod load;
pub(crate) mod message;
pub(crate) mod service;

use std::io::{self, Read as _};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use prost_reflect::prost::Message as _;
use prost_reflect::{DynamicMessage, MethodDescriptor};
use tokio::runtime::Builder;
use tonic::metadata::{KeyAndValueRef, MetadataMap};
use tonic_rdma::Config;
use tonic_rdma_commands::process::report_line;
use tonic_rdma_commands::{Context as _, Failure, units};

use crate::call::channel::{Connection, Header, Server, Transport};
use crate::call::service::{Services, describe};

pub(crate) const HELP: &str = "\
The server describes its messages by gRPC reflection, or a file does. Answers are JSON, one after the other. The exit status is \
0 if the call ended with OK, 1 if it did not, and 2 for input that is not accepted. The variables of a client, such as \
RDMA_POLICY and RDMA_DEVICE, hold here too.

Examples:
  tonic-rdma call 10.0.0.7:50051 --list
  tonic-rdma call 10.0.0.7:50051 grpc.health.v1.Health/Check --describe
  tonic-rdma call 10.0.0.7:50051 grpc.health.v1.Health/Check -d '{\"service\": \"\"}'
  tonic-rdma call 10.0.0.7:50051 my.Sums/Add -d '{\"x\": 1} {\"x\": 2}'          a stream of two messages
  tonic-rdma call 10.0.0.7:50051 my.Files/Put -d @file.json -H 'authorization: Bearer abc' --transport tcp";

/// What `call` and `load` have in common: whom to ask for what.
#[derive(Clone, Debug, Args)]
pub(crate) struct Calls {
    /// The message as JSON; @FILE reads a file, @- stdin
    ///
    /// Several values, one after the other or in an array, are several messages. Without this option a method
    /// that takes one message gets an empty one.
    #[arg(short, long, value_name = "JSON", allow_hyphen_values = true)]
    data: Option<String>,
    /// A header, such as 'authorization: Bearer abc'
    ///
    /// The value is base64 if the name ends in -bin. The option may be given several times.
    #[arg(short = 'H', long, value_name = "HEADER", value_parser = Header::parse)]
    header: Vec<Header>,
    /// The longest time of a call, its gRPC deadline
    ///
    /// In seconds, or with a unit (300ms, 2m).
    #[arg(long, value_name = "TIME", default_value = "20", allow_negative_numbers = true, value_parser = units::parse_time)]
    deadline: Duration,
    /// Descriptors from this file, not from the server
    ///
    /// The file is what `protoc --include_imports --descriptor_set_out=FILE` writes.
    #[arg(long, value_name = "FILE")]
    descriptor_set: Option<PathBuf>,
}

/// The options of `call`.
#[derive(Clone, Debug, Args)]
pub(crate) struct CallOptions {
    /// The server: HOST:PORT, or an http URL
    #[arg(value_name = "URL", value_parser = Server::parse)]
    server: Server,
    /// The method, such as my.package.Service/Method
    ///
    /// The package may be left out if one service alone has the name.
    #[arg(value_name = "SERVICE/METHOD", required_unless_present_any = ["list", "describe"])]
    method: Option<String>,
    #[command(flatten)]
    calls: Calls,
    /// auto, tcp, drop-in or native
    ///
    /// auto is the best that the server has; drop-in is HTTP/2 over RDMA, and native is RDMA without HTTP/2.
    /// A call that goes another way says so.
    #[arg(long, value_name = "NAME", hide_possible_values = true, default_value = "auto")]
    transport: Transport,
    /// List the methods of the server, or of SERVICE
    #[arg(long, conflicts_with_all = ["describe", "data"])]
    list: bool,
    /// Describe messages, fields, and JSON for -d
    ///
    /// Of SERVICE, of SERVICE/METHOD, or of everything that the server has.
    #[arg(long, conflicts_with = "data")]
    describe: bool,
    /// Show transport, headers and trailers on stderr
    #[arg(short, long)]
    verbose: bool,
}

/// Makes a call, or shows what there is to call.
pub(crate) fn run(options: &CallOptions) -> Result<(), Failure> {
    let config = Config::from_env().map_err(|error| Failure::usage(error.to_string()))?;
    let data = options.calls.text()?;
    let runtime = Builder::new_current_thread().enable_all().build().context("can't start a runtime")?;
    runtime.block_on(async {
        tokio::select! {
            biased;
            _ = tokio::signal::ctrl_c() => Err(Failure::Interrupted),
            done = carry_out(options, data.as_deref(), &config) => done,
        }
    })
}

async fn carry_out(options: &CallOptions, data: Option<&str>, config: &Config) -> Result<(), Failure> {
    let mut connection = None;
    let services = match &options.calls.descriptor_set {
        Some(file) => Services::read(file)?,
        None => {
            let made = Connection::open(&options.server, options.transport, config).await?;
            let wanted = |names: &[String]| service::wanted(names, options.method.as_deref());
            Services::of_server(connection.insert(made), &options.calls.header, wanted).await?
        }
    };
    let text = options.method.as_deref();
    if options.list {
        return report_line(services.list(text)?);
    }
    let Some(text) = text.filter(|_| !options.describe) else {
        return report_line(services.describe(text)?);
    };
    let method = services.method(text)?;
    let messages = encode(&options.calls.messages(&method, data)?);
    if !method.is_client_streaming() && messages.len() > 1 {
        let (name, count) = (method.full_name(), messages.len());
        return Err(Failure::usage(format!("-d: {name} takes one message, and there are {count}")));
    }
    let mut connection = match connection {
        Some(connection) => connection,
        None => Connection::open(&options.server, options.transport, config).await?,
    };
    let name = method.full_name();
    let metadata = options.calls.metadata();
    let called = call(&mut connection, &method, &metadata, messages, options.verbose);
    let called = tokio::time::timeout(options.calls.deadline, called).await;
    let late = || {
        let deadline = options.calls.deadline;
        Failure::run(format!(
            "{name}: DEADLINE_EXCEEDED: the call did not end within {deadline:?} (--deadline)"
        ))
    };
    let path = connection.path();
    if ![Transport::Auto, path.transport].contains(&options.transport) {
        note(&format!(
            "WARNING: --transport {}: the call went by {path}, because {}",
            options.transport, path.reason
        ));
    } else if options.verbose {
        note(&format!("transport: {path}, because {}", path.reason));
    }
    called.unwrap_or_else(|_| Err(late()))
}

/// Calls `method` once, and shows each answer as it comes.
async fn call(
    connection: &mut Connection,
    method: &MethodDescriptor,
    metadata: &MetadataMap,
    messages: Vec<Bytes>,
    verbose: bool,
) -> Result<(), Failure> {
    let failed = |status| Failure::run(format!("{}: {}", method.full_name(), describe(&status)));
    let path = service::path(method)?;
    let response = connection.call(&path, metadata, tokio_stream::iter(messages)).await.map_err(failed)?;
    show(verbose, "header", response.metadata());
    let mut answers = response.into_inner();
    let mut count = 0;
    while let Some(bytes) = answers.message().await.map_err(failed)? {
        let answer = DynamicMessage::decode(method.output(), bytes);
        let answer = answer.context(format!("an answer is no {}", method.output().full_name()))?;
        report_line(message::to_json(&answer)?)?;
        count += 1;
    }
    if let Some(trailers) = answers.trailers().await.map_err(failed)? {
        show(verbose, "trailer", &trailers);
    }
    match (method.is_server_streaming(), count) {
        (false, 0) => {
            Err(Failure::run(format!("{}: the server sent OK without an answer", method.full_name())))
        }
        _ => Ok(()),
    }
}

impl Calls {
    /// Returns what is to be sent, as text.
    fn text(&self) -> Result<Option<String>, Failure> {
        let Some(data) = &self.data else { return Ok(None) };
        let unreadable =
            |error: io::Error| Failure::usage(format!("-d {data}: can't be read")).because(error);
        match data.strip_prefix('@') {
            None => Ok(Some(data.clone())),
            Some("" | "-") => {
                let mut text = String::new();
                io::stdin().lock().read_to_string(&mut text).map_err(unreadable)?;
                Ok(Some(text))
            }
            Some(file) => std::fs::read_to_string(file).map(Some).map_err(unreadable),
        }
    }

    fn metadata(&self) -> MetadataMap {
        channel::metadata(&self.header, self.deadline)
    }

    /// Returns the messages of `data` for `method`.
    fn messages(
        &self,
        method: &MethodDescriptor,
        data: Option<&str>,
    ) -> Result<Vec<DynamicMessage>, Failure> {
        match data {
            Some(data) => {
                let messages = message::parse("-d", &method.input(), data)?;
                match messages.is_empty() && !method.is_client_streaming() {
                    true => Err(Failure::usage(format!(
                        "-d: {} takes a message; {{}} is one",
                        method.full_name()
                    ))),
                    false => Ok(messages),
                }
            }
            None if method.is_client_streaming() => Ok(Vec::new()),
            None => Ok(vec![DynamicMessage::new(method.input())]),
        }
    }
}

fn encode(messages: &[DynamicMessage]) -> Vec<Bytes> {
    messages.iter().map(|message| message.encode_to_vec().into()).collect()
}

/// Shows metadata, if asked to.
fn show(verbose: bool, kind: &str, metadata: &MetadataMap) {
    for entry in metadata.iter().filter(|_| verbose) {
        match entry {
            KeyAndValueRef::Ascii(key, value) => {
                note(&format!("{kind}: {key}: {}", String::from_utf8_lossy(value.as_bytes())));
            }
            KeyAndValueRef::Binary(key, value) => {
                note(&format!("{kind}: {key}: {}", String::from_utf8_lossy(value.as_encoded_bytes())));
            }
        }
    }
}

/// Writes this text as one line to stderr.
fn note(text: &str) {
    tonic_rdma_commands::output::note(&tonic_rdma_commands::one_line(text));
}
