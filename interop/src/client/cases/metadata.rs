//! Metadata of calls.

use tokio_stream::StreamExt as _;
use tonic::Request;
use tonic::metadata::{MetadataMap, MetadataValue};

use super::official::{ensure_reply, large, output_request};
use crate::client::case::{CaseError, CaseResult, Session, ensure, ensure_eq};

const INITIAL: &str = "x-grpc-test-echo-initial";
const TRAILING: &str = "x-grpc-test-echo-trailing-bin";

/// Sends the metadata of the official description.
pub(super) async fn custom_metadata(session: Session) -> CaseResult {
    check_echo(&session, "test_initial_metadata_value", &[0xab, 0xab, 0xab]).await
}

/// Sends every byte value, and text whose spaces have to stay.
pub(super) async fn checked_binary_metadata(session: Session) -> CaseResult {
    let all: Vec<u8> = (0..=255).collect();
    check_echo(&session, "a value,  with spaces; and = \"signs\" ~", &all).await?;
    // Base64 pads these lengths in all possible ways.
    for length in [0, 1, 2, 3] {
        check_echo(&session, "x", &all[255 - length..255]).await?;
    }
    Ok(())
}

/// Sends more metadata than fits into one small frame.
pub(super) async fn checked_large_metadata(session: Session) -> CaseResult {
    let initial: String = (0..3000u32).map(|index| char::from(b'!' + (index * 31 % 90) as u8)).collect();
    let trailing: Vec<u8> = (0..2000u32).map(|index| (index * 31 % 251) as u8).collect();
    check_echo(&session, &initial, &trailing).await
}

/// Checks that both values come back from a unary and from a streaming call, as header and as trailer.
async fn check_echo(session: &Session, initial: &str, trailing: &[u8]) -> CaseResult {
    let with_metadata = |metadata: &mut MetadataMap| {
        let value = MetadataValue::try_from(initial);
        let value = value.map_err(|error| CaseError::Failed(format!("{initial:?} is no header: {error}")))?;
        metadata.insert(INITIAL, value);
        metadata.insert_bin(TRAILING, MetadataValue::from_bytes(trailing));
        Ok::<_, CaseError>(())
    };

    let mut request = Request::new(large());
    with_metadata(request.metadata_mut())?;
    let reply = session.official().unary_call(request).await?;
    ensure_initial("the unary call", reply.metadata(), initial)?;
    ensure_trailing("the unary call", reply.metadata(), trailing)?;

    let mut request = Request::new(tokio_stream::iter([output_request(&[314_159], 271_828)]));
    with_metadata(request.metadata_mut())?;
    let reply = session.official().full_duplex_call(request).await?;
    ensure_initial("the streaming call", reply.metadata(), initial)?;
    ensure(reply.metadata().get_bin(TRAILING).is_none(), || format!("{TRAILING} came before the replies"))?;
    let mut replies = reply.into_inner();
    while let Some(reply) = replies.next().await {
        ensure_reply("the streaming call's reply", reply?, 314_159)?;
    }
    let trailers = replies.trailers().await?.unwrap_or_default();
    ensure_trailing("the streaming call", &trailers, trailing)
}

fn ensure_initial(what: &str, metadata: &MetadataMap, expected: &str) -> CaseResult {
    let found = metadata.get(INITIAL).map(|value| String::from_utf8_lossy(value.as_bytes()));
    ensure_eq(&format!("{INITIAL} of {what}"), found.as_deref(), Some(expected))
}

fn ensure_trailing(what: &str, metadata: &MetadataMap, expected: &[u8]) -> CaseResult {
    let found = metadata.get_bin(TRAILING).map(|value| value.to_bytes());
    let found =
        found.transpose().map_err(|error| CaseError::Failed(format!("{TRAILING} of {what}: {error}")))?;
    ensure_eq(&format!("{TRAILING} of {what}"), found.as_deref(), Some(expected))
}
