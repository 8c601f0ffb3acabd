//! Metadata both ways: names with several values, binary ones, large ones, many of them, and the headers that
//! gRPC itself defines.

use std::collections::BTreeSet;

use bytes::Bytes;
use tonic::metadata::{KeyAndValueRef, MetadataMap, MetadataValue};
use tonic::{Request, Response, Status};

use crate::caller::Caller;
use crate::column::Column;
use crate::content::{check, joined, message};
use crate::probe::{self, Probe};

/// Returns a service that sends the metadata of a request back: as the head of the response with `Unary`, and
/// as trailers of an error with `Collect`.
fn mirror() -> Probe {
    Probe::new()
        .unary(async |request| {
            let mut response = Response::new(Bytes::new());
            *response.metadata_mut() = only_ours(request.metadata());
            Ok(response)
        })
        .collect(async |request| {
            let metadata = only_ours(request.metadata());
            Err(Status::with_metadata(tonic::Code::Aborted, "mirrored", metadata))
        })
}

/// Returns the entries whose names begin with `x-`.
fn only_ours(metadata: &MetadataMap) -> MetadataMap {
    let mut ours = MetadataMap::new();
    for entry in metadata.iter() {
        match entry {
            KeyAndValueRef::Ascii(name, value) if name.as_str().starts_with("x-") => {
                ours.append(name, value.clone());
            }
            KeyAndValueRef::Binary(name, value) if name.as_str().starts_with("x-") => {
                ours.append_bin(name, value.clone());
            }
            _ => {}
        }
    }
    ours
}

/// Sends `metadata` and returns what comes back: in the head, and in trailers.
async fn mirrored(column: Column, metadata: &MetadataMap) -> [MetadataMap; 2] {
    let running = column.serve(mirror()).await;
    let mut client = column.client(&running).await;
    let mut request = Request::new(message(1, 10));
    *request.metadata_mut() = metadata.clone();
    let head = client.unary(request).await.unwrap();
    let mut request = Request::new(tokio_stream::once(message(1, 10)));
    *request.metadata_mut() = metadata.clone();
    let trailers = client.collect(request).await.unwrap_err();
    [only_ours(head.metadata()), only_ours(trailers.metadata())]
}

/// Checks that `metadata` comes back unchanged, in the order of its values.
async fn comes_back(column: Column, metadata: MetadataMap) -> String {
    for found in mirrored(column, &metadata).await {
        let names: BTreeSet<_> = metadata.as_ref().keys().map(|name| name.as_str().to_owned()).collect();
        let found_names: BTreeSet<_> = found.as_ref().keys().map(|name| name.as_str().to_owned()).collect();
        assert_eq!(found_names, names);
        for name in names {
            if name.ends_with("-bin") {
                let bytes = |map: &MetadataMap| -> Vec<Bytes> {
                    map.get_all_bin(&*name).iter().map(|value| value.to_bytes().unwrap()).collect()
                };
                assert_eq!(bytes(&found), bytes(&metadata), "{name}");
            } else {
                let values = |map: &MetadataMap| -> Vec<Vec<u8>> {
                    map.get_all(&*name).iter().map(|value| value.as_encoded_bytes().to_vec()).collect()
                };
                assert_eq!(values(&found), values(&metadata), "{name}");
            }
        }
    }
    "comes back in the head and in trailers".to_owned()
}

pub(crate) async fn of_text(column: Column) -> String {
    let mut metadata = MetadataMap::new();
    metadata.insert("x-one", "1".parse().unwrap());
    metadata.insert("x-empty", "".parse().unwrap());
    metadata.insert("x-signs", "a=b; c, d \"e\" %20 ~".parse().unwrap());
    comes_back(column, metadata).await
}

pub(crate) async fn with_several_values(column: Column) -> String {
    let mut metadata = MetadataMap::new();
    for value in ["first", "second", "", "first", "a, b"] {
        metadata.append("x-several", value.parse().unwrap());
    }
    comes_back(column, metadata).await
}

pub(crate) async fn that_is_binary(column: Column) -> String {
    let mut metadata = MetadataMap::new();
    metadata.insert_bin("x-all-bin", MetadataValue::from_bytes(&(0..=255).collect::<Vec<u8>>()));
    metadata.insert_bin("x-empty-bin", MetadataValue::from_bytes(b""));
    for length in 0..10 {
        metadata.append_bin("x-several-bin", MetadataValue::from_bytes(&message(length, length as usize)));
    }
    comes_back(column, metadata).await
}

pub(crate) async fn of_6_kib(column: Column) -> String {
    let mut metadata = MetadataMap::new();
    metadata.insert("x-large", "v".repeat(3000).parse().unwrap());
    metadata.insert_bin("x-large-bin", MetadataValue::from_bytes(&message(3, 2000)));
    comes_back(column, metadata).await
}

pub(crate) async fn of_a_hundred_names(column: Column) -> String {
    let mut metadata = MetadataMap::new();
    for number in 0..100 {
        let name: tonic::metadata::AsciiMetadataKey = format!("x-name-{number}").parse().unwrap();
        metadata.insert(name, format!("value {number}").parse().unwrap());
    }
    comes_back(column, metadata).await
}

/// Each call has other names and values, so a table of repeated ones fills up.
pub(crate) async fn that_never_repeats(column: Column) -> String {
    let running = column.serve(mirror()).await;
    let mut client = column.client(&running).await;
    for number in 0..2000 {
        let mut request = Request::new(Bytes::new());
        let name: tonic::metadata::AsciiMetadataKey = format!("x-unique-{number}").parse().unwrap();
        let value = format!("{number}: {}", "v".repeat(number % 200));
        request.metadata_mut().insert(&name, value.parse().unwrap());
        request.metadata_mut().insert("x-same", "again".parse().unwrap());
        let reply = client.unary(request).await.unwrap();
        assert_eq!(reply.metadata().get(&name).unwrap(), value.as_str());
        assert_eq!(reply.metadata().get("x-same").unwrap(), "again");
    }
    "2000 calls get their own back".to_owned()
}

pub(crate) async fn of_sensitive_values(column: Column) -> String {
    let running = column.serve(mirror()).await;
    let mut client = column.client(&running).await;
    for secret in ["a secret", "another one", "a secret"] {
        let mut request = Request::new(Bytes::new());
        let mut value: MetadataValue<_> = secret.parse().unwrap();
        value.set_sensitive(true);
        request.metadata_mut().insert("x-token", value);
        let reply = client.unary(request).await.unwrap();
        assert_eq!(reply.metadata().get("x-token").unwrap(), secret);
    }
    "comes back".to_owned()
}

/// Returns the named headers of a request as the handler sees them.
async fn seen(client: &mut Caller, names: &str) -> String {
    let reply = client.echo(names.to_owned()).await.unwrap();
    String::from_utf8(reply.to_vec()).unwrap()
}

/// Returns a service that answers with the headers that a request names.
fn headers() -> Probe {
    Probe::new().unary(async |request| {
        let names = String::from_utf8(request.get_ref().to_vec()).unwrap();
        let values = names.split(' ').map(|name| {
            let value = request.metadata().get(name).map(|value| value.to_str().unwrap());
            format!("{name}: {}", value.unwrap_or("none"))
        });
        Ok(Response::new(joined(values).into()))
    })
}

pub(crate) async fn of_grpc_itself(column: Column) -> String {
    let running = column.serve(headers()).await;
    seen(&mut column.client(&running).await, "content-type te grpc-encoding").await
}

pub(crate) async fn user_agent(column: Column) -> String {
    let running = column.serve(headers()).await;
    let plain = seen(&mut column.client(&running).await, "user-agent").await;
    let endpoint = running.endpoint().user_agent("probe/1").unwrap();
    let named = seen(&mut Caller::new(column.connect(endpoint).await.unwrap()), "user-agent").await;
    let version = |seen: &str| seen.replace(|letter: char| letter.is_ascii_digit(), "0");
    joined([version(&plain), version(&named)])
}

pub(crate) async fn tracing_context(column: Column) -> String {
    let running = column.serve(headers()).await;
    let mut client = column.client(&running).await;
    let mut request = Request::new(Bytes::from("traceparent tracestate baggage"));
    for (name, value) in [
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("tracestate", "congo=t61rcWkgMzE"),
        ("baggage", "userId=alice"),
    ] {
        request.metadata_mut().insert(name, value.parse().unwrap());
    }
    String::from_utf8(client.unary(request).await.unwrap().into_inner().to_vec()).unwrap()
}

/// Names that gRPC keeps for itself can't be set by a caller.
pub(crate) async fn reserved_names(column: Column) -> String {
    let running = column.serve(headers()).await;
    let mut client = column.client(&running).await;
    let mut request = Request::new(Bytes::from("te content-type grpc-status grpc-message"));
    for name in ["te", "content-type", "grpc-status", "grpc-message"] {
        request.metadata_mut().insert(name, "ours".parse().unwrap());
    }
    String::from_utf8(client.unary(request).await.unwrap().into_inner().to_vec()).unwrap()
}

pub(crate) async fn trailers_after_messages(column: Column) -> String {
    let probe = Probe::new().produce(async |_| {
        let mut metadata = MetadataMap::new();
        metadata.append("x-trailer", "one".parse().unwrap());
        metadata.append("x-trailer", "two".parse().unwrap());
        metadata.insert_bin("x-trailer-bin", MetadataValue::from_bytes(&message(1, 99)));
        let end = Status::with_metadata(tonic::Code::Ok, "", metadata);
        Ok(Response::new(probe::stream(tokio_stream::iter([Ok(message(5, 50)), Err(end)]))))
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let mut replies = client.produce(Request::new(Bytes::new())).await.unwrap().into_inner();
    check(&probe::first(&mut replies).await.unwrap(), 5, 50);
    assert!(replies.message().await.unwrap().is_none(), "a message too many");
    let trailers = replies.trailers().await.unwrap().unwrap_or_default();
    let values: Vec<_> =
        trailers.get_all("x-trailer").iter().map(|value| value.to_str().unwrap().to_owned()).collect();
    check(&trailers.get_bin("x-trailer-bin").unwrap().to_bytes().unwrap(), 1, 99);
    joined(values)
}
