//! How calls end: statuses, details, trailers, methods that do not exist, and handlers that panic.

use bytes::Bytes;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Request, Response, Status};

use crate::column::Column;
use crate::content::{check, code, joined, message, name};
use crate::probe::{self, Probe};

const SPECIAL: &str = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈 and 100 %\t\n";

pub(crate) async fn every_code(column: Column) -> String {
    let probe = Probe::new().unary(async |request| {
        let number = i32::from(request.get_ref()[0]);
        Err(Status::new(Code::from_i32(number), format!("number {number}")))
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let mut names = Vec::new();
    for number in 1..=16_u8 {
        let status = client.echo(vec![number]).await.unwrap_err();
        assert_eq!(status.message(), format!("number {number}"));
        names.push(name(&status));
    }
    joined(names)
}

pub(crate) async fn ok_as_an_error(column: Column) -> String {
    let running = column.serve(Probe::new().unary(async |_| Err(Status::ok("fine")))).await;
    let mut client = column.client(&running).await;
    code(client.echo("").await)
}

pub(crate) async fn messages_that_need_escapes(column: Column) -> String {
    let probe = Probe::new().unary(async |_| Err(Status::unknown(SPECIAL)));
    let running = column.serve(probe).await;
    let status = column.client(&running).await.echo("").await.unwrap_err();
    assert_eq!(status.message(), SPECIAL);
    format!("{} with the same message", name(&status))
}

pub(crate) async fn a_long_message(column: Column) -> String {
    let long = "why ".repeat(1500);
    let sent = long.clone();
    let probe = Probe::new().unary(move |_| {
        let sent = sent.clone();
        async move { Err(Status::aborted(sent)) }
    });
    let running = column.serve(probe).await;
    let status = column.client(&running).await.echo("").await.unwrap_err();
    assert!(status.message() == long, "{}: {:.200}", name(&status), status.message());
    format!("{} with {} bytes", name(&status), long.len())
}

/// Returns a status with details of 1000 bytes, and metadata.
fn detailed() -> Status {
    let mut metadata = MetadataMap::new();
    metadata.insert("x-cause", "a reason".parse().unwrap());
    metadata.insert_bin("x-cause-bin", MetadataValue::from_bytes(&message(8, 300)));
    Status::with_details_and_metadata(Code::FailedPrecondition, "not now", message(7, 1000), metadata)
}

/// Checks that all of [`detailed`] arrived.
fn check_details(status: &Status) -> String {
    assert_eq!(status.message(), "not now");
    check(status.details(), 7, 1000);
    assert_eq!(status.metadata().get("x-cause").unwrap(), "a reason");
    check(&status.metadata().get_bin("x-cause-bin").unwrap().to_bytes().unwrap(), 8, 300);
    format!("{} with details and metadata", name(status))
}

pub(crate) async fn trailers_only(column: Column) -> String {
    let running = column.serve(Probe::new().unary(async |_| Err(detailed()))).await;
    check_details(&column.client(&running).await.echo(message(1, 100)).await.unwrap_err())
}

pub(crate) async fn trailers_only_of_a_stream(column: Column) -> String {
    let running = column.serve(Probe::new().exchange(async |_| Err(detailed()))).await;
    let mut client = column.client(&running).await;
    let requests = Request::new(tokio_stream::pending::<Bytes>());
    check_details(&client.exchange(requests).await.unwrap_err())
}

pub(crate) async fn an_error_after_messages(column: Column) -> String {
    let probe = Probe::new().produce(async |_| {
        let replies = [Ok(message(1, 5000)), Ok(message(2, 0)), Ok(message(3, 70_000)), Err(detailed())];
        Ok(Response::new(probe::stream(tokio_stream::iter(replies))))
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let mut replies = client.produce(Request::new(Bytes::new())).await.unwrap().into_inner();
    for (seed, length) in [(1, 5000), (2, 0), (3, 70_000)] {
        check(&probe::first(&mut replies).await.unwrap(), seed, length);
    }
    let status = replies.message().await.unwrap_err();
    assert!(replies.message().await.unwrap().is_none(), "a message after the end");
    format!("3 messages, then {}", check_details(&status))
}

pub(crate) async fn an_error_before_messages_of_a_stream(column: Column) -> String {
    let probe =
        Probe::new().produce(async |_| Ok(Response::new(probe::stream(tokio_stream::once(Err(detailed()))))));
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let replies = client.produce(Request::new(Bytes::new())).await;
    check_details(&probe::first(&mut replies.unwrap().into_inner()).await.unwrap_err())
}

pub(crate) async fn a_method_that_does_not_exist(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await;
    let unknown = client.unary_at(probe::path("Unknown"), Request::new(message(1, 9000))).await;
    check(&client.echo(message(2, 1000)).await.unwrap(), 2, 1000);
    joined([code(unknown), "the connection goes on".to_owned()])
}

pub(crate) async fn a_service_that_does_not_exist(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await;
    let path = || "/semantics.Unknown/Unary".parse().unwrap();
    let unknown = client.unary_at(path(), Request::new(message(1, 9000))).await;
    check(&client.echo(message(2, 1000)).await.unwrap(), 2, 1000);
    joined([code(unknown), "the connection goes on".to_owned()])
}

pub(crate) async fn a_panic_of_a_handler(column: Column) -> String {
    let probe = Probe::new().unary(async |request| {
        if request.get_ref().is_empty() {
            // Without a panic hook's message: the test's output stays empty.
            std::panic::resume_unwind(Box::new("a handler's panic"));
        }
        Ok(Response::new(request.into_inner()))
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let panicked = code(client.echo("").await);
    // Over HTTP/2 the connection may have ended, so a call may have to dial again.
    let mut next = client.echo(message(1, 100)).await;
    if next.is_err() {
        next = client.echo(message(1, 100)).await;
    }
    check(&next.unwrap(), 1, 100);
    joined([panicked, "later calls: OK".to_owned()])
}

pub(crate) async fn a_panic_of_a_reply_stream(column: Column) -> String {
    let probe = Probe::new().produce(async |_| {
        let replies = tokio_stream::StreamExt::map(tokio_stream::once(()), |()| {
            std::panic::resume_unwind(Box::new("a stream's panic"))
        });
        Ok(Response::new(probe::stream(replies)))
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let outcome = match client.produce(Request::new(Bytes::new())).await {
        Ok(replies) => code(probe::first(&mut replies.into_inner()).await),
        Err(status) => name(&status),
    };
    let mut next = client.echo(message(1, 100)).await;
    if next.is_err() {
        next = client.echo(message(1, 100)).await;
    }
    check(&next.unwrap(), 1, 100);
    joined([outcome, "later calls: OK".to_owned()])
}
