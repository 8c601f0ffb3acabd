//! Streaming cases of the official list.

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::official::zeros;
use crate::client::case::{CaseError, CaseResult, Session, ensure_eq, ensure_zeros};
use crate::proto::testing::{
    ResponseParameters, StreamingInputCallRequest, StreamingOutputCallRequest, StreamingOutputCallResponse,
};

pub(super) const REQUESTS: [usize; 4] = [27_182, 8, 1_828, 45_904];
pub(super) const RESPONSES: [usize; 4] = [31_415, 9, 2_653, 58_979];

pub(super) fn output_request(responses: &[usize], payload: usize) -> StreamingOutputCallRequest {
    let parameters =
        responses.iter().map(|size| ResponseParameters { size: *size as i32, ..Default::default() });
    StreamingOutputCallRequest {
        response_parameters: parameters.collect(),
        payload: zeros(payload),
        ..Default::default()
    }
}

/// Returns the next reply. It fails at the end of the stream.
pub(super) async fn next_reply<M>(what: &str, replies: &mut Streaming<M>) -> Result<M, CaseError> {
    let reply = replies.message().await?;
    reply.ok_or_else(|| CaseError::Failed(format!("{what}: expected a reply, found the end of the stream")))
}

/// Checks that there is no further reply, and that the call succeeds.
pub(super) async fn ensure_end<M: std::fmt::Debug>(replies: &mut Streaming<M>) -> CaseResult {
    match replies.message().await? {
        None => Ok(()),
        Some(_) => Err(CaseError::Failed("expected the end of the stream, found another reply".to_owned())),
    }
}

pub(super) fn ensure_reply(what: &str, reply: StreamingOutputCallResponse, size: usize) -> CaseResult {
    ensure_zeros(what, &reply.payload.unwrap_or_default().body, size)
}

pub(super) async fn client_streaming(session: Session) -> CaseResult {
    let requests =
        REQUESTS.map(|size| StreamingInputCallRequest { payload: zeros(size), ..Default::default() });
    let reply = session.official().streaming_input_call(tokio_stream::iter(requests)).await?.into_inner();
    let total = REQUESTS.iter().sum::<usize>() as i32;
    ensure_eq("bytes that the server counted", reply.aggregated_payload_size, total)
}

pub(super) async fn server_streaming(session: Session) -> CaseResult {
    let request = output_request(&RESPONSES, 0);
    let mut replies = session.official().streaming_output_call(request).await?.into_inner();
    for (index, size) in RESPONSES.into_iter().enumerate() {
        let what = format!("reply {index}");
        let reply = next_reply(&what, &mut replies).await?;
        ensure_reply(&what, reply, size)?;
    }
    ensure_end(&mut replies).await
}

pub(super) async fn ping_pong(session: Session) -> CaseResult {
    let (sender, requests) = mpsc::channel(1);
    let send = async |index: usize| {
        let sent = sender.send(output_request(&[RESPONSES[index]], REQUESTS[index])).await;
        sent.map_err(|_| CaseError::Failed(format!("the call ended before request {index}")))
    };
    // The first request goes before the call, because many servers send no head before they have a reply.
    send(0).await?;
    let call = session.official().full_duplex_call(ReceiverStream::new(requests)).await?;
    let mut replies = call.into_inner();
    for (index, response) in RESPONSES.into_iter().enumerate() {
        if index > 0 {
            send(index).await?;
        }
        let what = format!("the reply to request {index}");
        let reply = next_reply(&what, &mut replies).await?;
        ensure_reply(&what, reply, response)?;
    }
    drop(sender);
    ensure_end(&mut replies).await
}

pub(super) async fn empty_stream(session: Session) -> CaseResult {
    let call = session.official().full_duplex_call(tokio_stream::empty()).await?;
    ensure_end(&mut call.into_inner()).await
}
