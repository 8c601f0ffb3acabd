//! The cases of the official list, but for those with compression and with metadata.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming};

use crate::client::case::{CaseError, CaseResult, Session, ensure, ensure_code, ensure_eq, ensure_zeros};
use crate::proto::testing::{
    EchoStatus, Empty, Payload, ResponseParameters, SimpleRequest, StreamingInputCallRequest,
    StreamingOutputCallRequest, StreamingOutputCallResponse,
};

const REQUEST: usize = 271_828;
const RESPONSE: usize = 314_159;

/// Number of calls of `concurrent_large_unary`, from the official descriptions.
const CONCURRENT: usize = 1000;

/// Returns a payload of zeros.
pub(super) fn zeros(size: usize) -> Option<Payload> {
    payload(vec![0; size].into())
}

pub(super) fn payload(body: Bytes) -> Option<Payload> {
    Some(Payload { body, ..Default::default() })
}

/// Returns the request of `large_unary`.
pub(super) fn large() -> SimpleRequest {
    large_of(vec![0; REQUEST].into())
}

fn large_of(body: Bytes) -> SimpleRequest {
    SimpleRequest { response_size: RESPONSE as i32, payload: payload(body), ..Default::default() }
}

pub(super) async fn empty_unary(session: Session) -> CaseResult {
    let reply = session.official().empty_call(Empty {}).await?.into_inner();
    ensure_eq("the reply", reply, Empty {})
}

pub(super) async fn large_unary(session: Session) -> CaseResult {
    let reply = session.official().unary_call(large()).await?.into_inner();
    ensure_zeros("the reply", &reply.payload.unwrap_or_default().body, RESPONSE)
}

pub(super) async fn concurrent_large_unary(session: Session) -> CaseResult {
    let body: Bytes = vec![0; REQUEST].into();
    let mut calls = JoinSet::new();
    for _ in 0..CONCURRENT {
        let mut client = session.official();
        let request = large_of(body.clone());
        calls.spawn(async move {
            let reply = client.unary_call(request).await?.into_inner();
            ensure_zeros("a reply", &reply.payload.unwrap_or_default().body, RESPONSE)
        });
    }
    while let Some(ended) = calls.join_next().await {
        ended.map_err(|error| CaseError::Failed(format!("a call's task ended: {error}")))??;
    }
    Ok(())
}

/// Checks that the reply is a time, and that caches may keep it. In the official case the second reply may
/// come from a cache; here there is none. The times are not compared, because gRPC's own server in C++ sends
/// the nanoseconds within the second, and a clock may go back.
pub(super) async fn cacheable_unary(session: Session) -> CaseResult {
    let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let body: Bytes = before.to_string().into();
    for _ in 0..2 {
        let mut request =
            Request::new(SimpleRequest { payload: payload(body.clone()), ..Default::default() });
        request.metadata_mut().insert("x-user-ip", tonic::metadata::MetadataValue::from_static("1.2.3.4"));
        let reply = session.official().cacheable_unary_call(request).await?;
        let control = reply.metadata().get("cache-control").and_then(|value| value.to_str().ok());
        let control = control.unwrap_or_default().to_owned();
        ensure(control.contains("max-age=60") && control.contains("public"), || {
            format!("cache-control: expected max-age=60, public; found {control:?}")
        })?;
        let body = reply.into_inner().payload.unwrap_or_default().body;
        let time = std::str::from_utf8(&body).ok().and_then(|text| text.parse::<u128>().ok());
        ensure(time.is_some(), || format!("the reply: expected a time, found {body:?}"))?;
    }
    Ok(())
}

pub(super) async fn unimplemented_method(session: Session) -> CaseResult {
    let ended = session.official().unimplemented_call(Empty {}).await;
    ensure_code("a method that no server implements", ended, Code::Unimplemented).map(drop)
}

pub(super) async fn unimplemented_service(session: Session) -> CaseResult {
    let ended = session.unimplemented().unimplemented_call(Empty {}).await;
    ensure_code("a service that no server has", ended, Code::Unimplemented).map(drop)
}

const REQUESTS: [usize; 4] = [27_182, 8, 1_828, 45_904];
const RESPONSES: [usize; 4] = [31_415, 9, 2_653, 58_979];

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

/// The message of `special_status_message`.
pub(super) const SPECIAL: &str = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n";

pub(super) async fn status_code_and_message(session: Session) -> CaseResult {
    let message = "test status message";
    unary_ends_with(&session, message).await?;

    let response_status = Some(EchoStatus { code: 2, message: message.to_owned() });
    let request = StreamingOutputCallRequest { response_status, ..Default::default() };
    let ended = first_reply(&session, Request::new(tokio_stream::iter([request]))).await;
    let status = ensure_code("the streaming call", ended, Code::Unknown)?;
    ensure_eq("the streaming call's message", status.message(), message)
}

pub(super) async fn special_status_message(session: Session) -> CaseResult {
    unary_ends_with(&session, SPECIAL).await
}

async fn unary_ends_with(session: &Session, message: &str) -> Result<(), CaseError> {
    let response_status = Some(EchoStatus { code: 2, message: message.to_owned() });
    let request = SimpleRequest { response_status, ..Default::default() };
    let ended = session.official().unary_call(request).await;
    let status = ensure_code("the unary call", ended, Code::Unknown)?;
    ensure_eq("the unary call's message", status.message(), message)
}

/// Makes a streaming call, and returns its first reply, or the status with which the call ended.
async fn first_reply(
    session: &Session,
    request: Request<impl Stream<Item = StreamingOutputCallRequest> + Send + 'static>,
) -> Result<Option<StreamingOutputCallResponse>, Status> {
    session.official().full_duplex_call(request).await?.into_inner().message().await
}

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
    let ended = first_reply(&session, request).await;
    ensure_code("the call, whose deadline passed", ended, Code::DeadlineExceeded)?;
    drop(sender);
    check_connection(&session).await
}

/// Checks that the connection still works after the end of a call.
async fn check_connection(session: &Session) -> CaseResult {
    empty_unary(session.clone()).await
}
