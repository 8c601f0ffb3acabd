//! Our cases: all kinds of calls, compression and status details, with content that both sides check.

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codec::CompressionEncoding;
use tonic::{Code, Streaming};
use tonic_types::{ErrorDetails, StatusExt as _};

use super::compressed::flags;
use super::official::{SPECIAL, ensure_end, next_reply};
use crate::client::case::{CaseError, CaseResult, Session, ensure, ensure_code, ensure_eq};
use crate::content::Content;
use crate::proto::checked::{CheckedReply, CheckedRequest, FailRequest};

const SIZES: [usize; 6] = [0, 1, 1000, 20_000, 1 << 20, 8 << 20];

/// Number of calls of `checked_concurrent` in flight at a time.
const CONCURRENT: u32 = 100;

/// Common content of the requests of one case.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedContent {
    pub(super) period: u32,
}

impl CheckedContent {
    /// Returns the request of call `index`, with `there` bytes, for a reply of `back` bytes. Its content is
    /// unique.
    pub(super) fn request(self, index: u32, there: usize, back: usize) -> CheckedRequest {
        let seed = seed(index);
        CheckedRequest {
            seed,
            payload: Content { seed, period: self.period }.bytes(there),
            reply_seed: !seed,
            reply_bytes: back as u32,
            count: 0,
            period: self.period,
        }
    }

    /// Checks the reply to the [`request`](Self::request) with these arguments.
    pub(super) fn check(self, reply: &CheckedReply, index: u32, there: usize, back: usize) -> CaseResult {
        let what = format!("call {index}, {there} bytes there and {back} back");
        ensure_eq(&format!("{what}: bytes that the server received"), reply.received_bytes, there as u64)?;
        ensure(reply.first_mismatch == 0, || {
            format!("{what}: the server found byte {} wrong", reply.first_mismatch.saturating_sub(1))
        })?;
        let seed = !seed(index);
        ensure_content(&what, reply, Content { seed, period: self.period }, back)
    }
}

/// Returns the seed of the request of call `index`. The seed of the reply has all bits inverted.
fn seed(index: u32) -> u32 {
    index.wrapping_mul(0x0101_0107).wrapping_add(1)
}

/// Content without a period.
const PLAIN: CheckedContent = CheckedContent { period: 0 };

/// Checks that the payload of `reply` is `content`, with `bytes` bytes.
fn ensure_content(what: &str, reply: &CheckedReply, content: Content, bytes: usize) -> CaseResult {
    ensure_eq(&format!("{what}: seed of the reply"), reply.seed, content.seed)?;
    ensure_eq(&format!("{what}: bytes of the reply"), reply.payload.len(), bytes)?;
    let wrong = content.first_mismatch(&reply.payload);
    ensure(wrong.is_none(), || format!("{what}: byte {} of the reply is wrong", wrong.unwrap_or(0)))
}

pub(super) async fn checked_unary(session: Session) -> CaseResult {
    let mut client = session.checked();
    for (index, there) in (0..).zip(SIZES) {
        for back in [there, 0, 1000] {
            let reply = client.unary(PLAIN.request(index, there, back)).await?;
            PLAIN.check(reply.get_ref(), index, there, back)?;
        }
        // A small request with a large reply.
        let reply = client.unary(PLAIN.request(index, 1, there)).await?;
        PLAIN.check(reply.get_ref(), index, 1, there)?;
    }
    Ok(())
}

pub(super) async fn checked_concurrent(session: Session) -> CaseResult {
    let mut calls = JoinSet::new();
    for index in 0..CONCURRENT {
        let mut client = session.checked();
        let size = |factor: u32| (index * factor % 97 * 3001) as usize;
        let (there, back) = (size(31), size(57));
        calls.spawn(async move {
            let reply = client.unary(PLAIN.request(index, there, back)).await?;
            PLAIN.check(reply.get_ref(), index, there, back)
        });
    }
    while let Some(ended) = calls.join_next().await {
        ended.map_err(|error| CaseError::Failed(format!("a call's task ended: {error}")))??;
    }
    Ok(())
}

pub(super) async fn checked_client_streaming(session: Session) -> CaseResult {
    let requests: Vec<_> = (0..).zip(SIZES).map(|(index, size)| PLAIN.request(index, size, 0)).collect();
    let reply = session.checked().collect(tokio_stream::iter(requests)).await?.into_inner();
    let total = SIZES.iter().sum::<usize>() as u64;
    ensure_eq("bytes that the server received", reply.received_bytes, total)?;
    ensure(reply.first_mismatch == 0, || {
        format!("the server found byte {} of a payload wrong", reply.first_mismatch.saturating_sub(1))
    })
}

pub(super) async fn checked_server_streaming(session: Session) -> CaseResult {
    for (count, bytes) in [(0, 100), (1, 8 << 20), (20, 300_000), (500, 1000)] {
        check_replies(&session, count, bytes).await?;
    }
    Ok(())
}

/// Checks `count` replies to one request, after which the client's side of the call is closed.
async fn check_replies(session: &Session, count: u32, bytes: usize) -> CaseResult {
    let request = CheckedRequest { count, ..PLAIN.request(count, 5000, bytes) };
    let seed = request.reply_seed;
    let mut replies = session.checked().produce(request).await?.into_inner();
    for index in 0..count {
        let what = format!("reply {index} of {count}");
        let reply = next_reply(&what, &mut replies).await?;
        ensure_eq(&format!("{what}: bytes that the server received"), reply.received_bytes, 5000)?;
        ensure_eq(&format!("{what}: first wrong byte that the server found"), reply.first_mismatch, 0)?;
        ensure_content(&what, &reply, Content::new(seed.wrapping_add(index)), bytes)?;
    }
    ensure_end(&mut replies).await
}

pub(super) async fn checked_ping_pong(session: Session) -> CaseResult {
    let (sender, requests) = mpsc::channel(1);
    let back = |index: u32| SIZES[SIZES.len() - 1 - index as usize];
    let send = async |index: u32, there| {
        let sent = sender.send(PLAIN.request(index, there, back(index))).await;
        sent.map_err(|_| CaseError::Failed(format!("request {index}: the call ended before it")))
    };
    // The first request goes before the call, because many servers send no head before they have a reply.
    send(0, SIZES[0]).await?;
    let mut replies = session.checked().exchange(ReceiverStream::new(requests)).await?.into_inner();
    for (index, there) in (0..).zip(SIZES) {
        if index > 0 {
            send(index, there).await?;
        }
        let reply = next_reply(&format!("request {index}"), &mut replies).await?;
        PLAIN.check(&reply, index, there, back(index))?;
    }
    drop(sender);
    ensure_end(&mut replies).await
}

/// Sends all requests and closes the client's stream before it reads the first of many replies. The flow
/// control windows keep the replies at the server.
pub(super) async fn checked_half_close(session: Session) -> CaseResult {
    const COUNT: u32 = 64;
    const BYTES: usize = 256 << 10;
    let requests: Vec<_> = (0..COUNT).map(|index| PLAIN.request(index, 10, BYTES)).collect();
    let mut replies: Streaming<_> =
        session.checked().exchange(tokio_stream::iter(requests)).await?.into_inner();
    for index in 0..COUNT {
        let reply = next_reply(&format!("request {index}"), &mut replies).await?;
        PLAIN.check(&reply, index, 10, BYTES)?;
    }
    ensure_end(&mut replies).await?;
    check_replies(&session, 5000, 1000).await
}

/// Content that repeats after 4000 bytes. It compresses well, because some libraries send plain what does not
/// get shorter.
const REPEATING: CheckedContent = CheckedContent { period: 1000 };

const COMPRESSED_SIZES: [usize; 3] = [20_000, 1 << 20, 4 << 20];

pub(super) async fn checked_gzip(session: Session) -> CaseResult {
    compressed_both_ways(session, CompressionEncoding::Gzip).await
}

/// Skips the case if the server reports that it has no zstd; most other libraries have none.
pub(super) async fn checked_zstd(session: Session) -> CaseResult {
    let probe = session
        .checked()
        .send_compressed(CompressionEncoding::Zstd)
        .unary(REPEATING.request(0, 1000, 0))
        .await;
    match probe {
        Err(status) if status.code() == Code::Unimplemented => {
            Err(CaseError::Skipped(format!("the server takes no zstd: {}", status.message())))
        }
        _ => compressed_both_ways(session, CompressionEncoding::Zstd).await,
    }
}

async fn compressed_both_ways(session: Session, encoding: CompressionEncoding) -> CaseResult {
    let mut client = session.checked().send_compressed(encoding).accept_compressed(encoding);
    for (index, size) in (0..).zip(COMPRESSED_SIZES) {
        let reply = client.unary(REPEATING.request(index, size, size)).await?;
        let what = format!("flags of {size} bytes");
        let (received, sent) = flags(reply.extensions());
        REPEATING.check(reply.get_ref(), index, size, size)?;
        ensure_eq(&format!("{what} sent"), sent, vec![true])?;
        ensure_eq(&format!("{what} received"), received, vec![true])?;
        let named = reply.metadata().get("grpc-encoding").map(|value| value.as_bytes().to_vec());
        ensure_eq(&format!("grpc-encoding of {size} bytes"), named, Some(encoding.to_string().into()))?;
    }

    let requests: Vec<_> =
        (0..).zip(COMPRESSED_SIZES).map(|(index, size)| REPEATING.request(index, size, size)).collect();
    let reply = client.exchange(tokio_stream::iter(requests)).await?;
    let extensions = reply.extensions().clone();
    let mut replies = reply.into_inner();
    for (index, size) in (0..).zip(COMPRESSED_SIZES) {
        let reply = next_reply(&format!("request {index} of the stream"), &mut replies).await?;
        REPEATING.check(&reply, index, size, size)?;
    }
    ensure_end(&mut replies).await?;
    let all = vec![true; COMPRESSED_SIZES.len()];
    ensure_eq("flags of the stream, received and sent", flags(&extensions), (all.clone(), all))
}

/// Checks that a google.rpc.Status arrives complete, with a message that needs escapes, and a trailer.
pub(super) async fn checked_status_details(session: Session) -> CaseResult {
    let mut details =
        ErrorDetails::with_error_info("CHECKED", "interop.test", [("key".to_owned(), "😈".to_owned())]);
    details.add_bad_request_violation("payload", SPECIAL);
    details.set_retry_info(Some(std::time::Duration::from_millis(1500)));
    let example = tonic::Status::with_error_details(Code::FailedPrecondition, SPECIAL, details.clone());

    let request = FailRequest {
        code: Code::FailedPrecondition.into(),
        message: SPECIAL.to_owned(),
        details: example.details().to_vec().into(),
    };
    let ended = session.checked().fail(request).await;
    let status = ensure_code("the call", ended, Code::FailedPrecondition)?;
    ensure_eq("the message", status.message(), SPECIAL)?;
    ensure_eq("the details' bytes", status.details(), example.details())?;
    let found = status.check_error_details();
    let found =
        found.map_err(|error| CaseError::Failed(format!("the details are no google.rpc.Status: {error}")))?;
    ensure_eq("the details", format!("{found:?}"), format!("{details:?}"))?;
    let trailer = status.metadata().get_bin("x-checked-bin").and_then(|value| value.to_bytes().ok());
    ensure_eq("the trailer x-checked-bin", trailer.as_deref(), Some(example.details()))
}
