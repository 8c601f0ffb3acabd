//! Calls that end with the status in their request.

use tonic::Code;

use crate::client::case::{CaseError, CaseResult, Session, ensure_code, ensure_eq};
use crate::proto::testing::{EchoStatus, SimpleRequest, StreamingOutputCallRequest};

pub(super) const SPECIAL: &str = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n";

pub(super) async fn status_code_and_message(session: Session) -> CaseResult {
    let message = "test status message";
    unary_ends_with(&session, message).await?;

    let response_status = Some(EchoStatus { code: 2, message: message.to_owned() });
    let request = StreamingOutputCallRequest { response_status, ..Default::default() };
    let ended = match session.official().full_duplex_call(tokio_stream::iter([request])).await {
        Ok(reply) => reply.into_inner().message().await,
        Err(status) => Err(status),
    };
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
