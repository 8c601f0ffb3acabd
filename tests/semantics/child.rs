//! The roles of child processes.

use bytes::Bytes;
use support::{ROLE, Runtime, announce};
use tonic::transport::Endpoint;
use tonic::{Request, Response};

use crate::caller::Caller;
use crate::column::{Column, ServerSettings};
use crate::content::message;
use crate::probe::{self, Probe};

/// Does nothing when run as a test. In a child process, plays the role that the parent gave it.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["serve", column] => Runtime::Idle.run_for_ever(serve(Column::named(column))),
        ["hold", column, address] => Runtime::Idle.run_for_ever(hold(Column::named(column), address)),
        _ => panic!("{role:?} is no role"),
    }
}

/// Serves until the process is killed. `Unary` never answers an empty request, and `Produce` never ends after
/// one reply.
async fn serve(column: Column) {
    let probe = Probe::new()
        .unary(async |request| {
            if request.get_ref().is_empty() {
                std::future::pending::<()>().await;
            }
            Ok(Response::new(request.into_inner()))
        })
        .produce(async |_| {
            let replies = tokio_stream::once(Ok(message(1, 3000)));
            let replies = tokio_stream::StreamExt::chain(replies, tokio_stream::pending());
            Ok(Response::new(probe::stream(replies)))
        });
    let running = column.serve_with(ServerSettings::default(), probe).await;
    announce(running.address);
    std::future::pending::<()>().await;
}

/// Makes calls that the server does not answer, one after the other: a server that pings may end the
/// connection of a client that a busy machine keeps from answering.
async fn hold(column: Column, address: &str) {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let mut client = Caller::new(column.connect(endpoint).await.unwrap());
    announce("connected");
    loop {
        let _ = client.collect(Request::new(tokio_stream::pending::<Bytes>())).await;
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}
