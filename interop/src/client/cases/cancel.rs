//! Calls that the client cancels, or whose deadline passes.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request};

use super::streaming::{ensure_reply, next_reply, output_request};
use crate::client::case::{CaseError, CaseResult, Session, ensure_code};
use crate::proto::testing::StreamingInputCallRequest;

/// Time after which a call's head is on its way.
const HEAD_SENT: Duration = Duration::from_millis(20);

pub(super) async fn cancel_after_begin(session: Session) -> CaseResult {
    let mut request = Request::new(tokio_stream::pending::<StreamingInputCallRequest>());
    let handle = request.cancellation_handle();
    let mut client = session.official();
    let (ended, ()) = tokio::join!(client.streaming_input_call(request), async {
        tokio::time::sleep(HEAD_SENT).await;
        handle.cancel();
    });
    ensure_code("the cancelled call", ended, Code::Cancelled)?;
    check_connection(&session).await
}

pub(super) async fn cancel_after_first_response(session: Session) -> CaseResult {
    let (sender, requests) = mpsc::channel(1);
    let mut request = Request::new(ReceiverStream::new(requests));
    let handle = request.cancellation_handle();
    // The request goes before the call, because many servers send no head before they have a reply.
    let sent = sender.send(output_request(&[31_415], 27_182)).await;
    sent.map_err(|_| CaseError::Failed("the first request could not be given to the call".to_owned()))?;
    let mut replies = session.official().full_duplex_call(request).await?.into_inner();
    let reply = next_reply("the first request", &mut replies).await?;
    ensure_reply("the first reply", reply, 31_415)?;
    handle.cancel();
    ensure_code("the cancelled call", replies.message().await, Code::Cancelled)?;
    check_connection(&session).await
}

pub(super) async fn timeout_on_sleeping_server(session: Session) -> CaseResult {
    let (sender, requests) = mpsc::channel(1);
    let mut request = Request::new(ReceiverStream::new(requests));
    request.set_timeout(Duration::from_millis(1));
    let sent = sender.send(output_request(&[], 27_182)).await;
    sent.map_err(|_| CaseError::Failed("the request could not be given to the call".to_owned()))?;
    // The sender stays open, so that the server waits for more requests.
    let ended = match session.official().full_duplex_call(request).await {
        Ok(reply) => reply.into_inner().message().await,
        Err(status) => Err(status),
    };
    ensure_code("the call, whose deadline passed", ended, Code::DeadlineExceeded)?;
    drop(sender);
    check_connection(&session).await
}

/// Checks that the connection still works after the end of a call.
async fn check_connection(session: &Session) -> CaseResult {
    super::official::empty_unary(session.clone()).await
}
