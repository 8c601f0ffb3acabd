//! Compression and status details, with checked content.

use tonic::Code;
use tonic::codec::CompressionEncoding;
use tonic_types::{ErrorDetails, StatusExt as _};

use super::checked_calls::CheckedContent;
use super::compressed::flags;
use super::status::SPECIAL;
use super::streaming::{ensure_end, next_reply};
use crate::client::case::{CaseError, CaseResult, Session, ensure_code, ensure_eq};
use crate::proto::checked::FailRequest;

/// Content that repeats after 4000 bytes. It compresses well, because some libraries send plain what does not get shorter.
const REPEATING: CheckedContent = CheckedContent { period: 1000 };

const SIZES: [usize; 3] = [20_000, 1 << 20, 4 << 20];

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
    for (index, size) in (0..).zip(SIZES) {
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
        (0..).zip(SIZES).map(|(index, size)| REPEATING.request(index, size, size)).collect();
    let reply = client.exchange(tokio_stream::iter(requests)).await?;
    let extensions = reply.extensions().clone();
    let mut replies = reply.into_inner();
    for (index, size) in (0..).zip(SIZES) {
        let reply = next_reply(&format!("request {index} of the stream"), &mut replies).await?;
        REPEATING.check(&reply, index, size, size)?;
    }
    ensure_end(&mut replies).await?;
    let all = vec![true; SIZES.len()];
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
