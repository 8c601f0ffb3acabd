//! Compression cases of the official list. The first call of each case detects a server that ignores
//! compression: a correct server refuses the message of this call, or sets a flag.

use tonic::{Code, Request};

use super::official::{ensure_end, ensure_reply, large, next_reply, zeros};
use crate::client::case::{CaseResult, Session, ensure_code, ensure_eq, ensure_zeros};
use crate::compression::{Flags, Received, Sent, Wanted};
use crate::proto::testing::{
    BoolValue, ResponseParameters, SimpleRequest, StreamingInputCallRequest, StreamingOutputCallRequest,
};

const YES: Option<BoolValue> = Some(BoolValue { value: true });
const NO: Option<BoolValue> = Some(BoolValue { value: false });

/// Makes a request whose messages are compressed as `compressed` states.
fn with_flags<T, const COUNT: usize>(message: T, compressed: [bool; COUNT]) -> Request<T> {
    let mut request = Request::new(message);
    request.extensions_mut().insert(Wanted(Flags::from(compressed)));
    request
}

/// Returns the flags received and sent so far.
pub(super) fn flags(extensions: &http::Extensions) -> (Vec<bool>, Vec<bool>) {
    let received = extensions.get().map(|Received(flags)| flags.rest());
    let sent = extensions.get().map(|Sent(flags)| flags.rest());
    (received.unwrap_or_default(), sent.unwrap_or_default())
}

pub(super) async fn client_compressed_unary(session: Session) -> CaseResult {
    let mut client = session.official_compressed();
    let probe = with_flags(SimpleRequest { expect_compressed: YES, ..large() }, [false]);
    let refused = client.unary_call(probe).await;
    ensure_code(
        "the probe, plain while the server is to expect it compressed",
        refused,
        Code::InvalidArgument,
    )?;

    for (expect_compressed, compressed) in [(YES, true), (NO, false)] {
        let request = with_flags(SimpleRequest { expect_compressed, ..large() }, [compressed]);
        let reply = client.unary_call(request).await?;
        ensure_eq("the flag of the request", flags(reply.extensions()).1, vec![compressed])?;
        ensure_zeros("the reply", &reply.into_inner().payload.unwrap_or_default().body, 314_159)?;
    }
    Ok(())
}

/// Sends plain requests: they do not announce compression by `expect_compressed`, and gRPC's own server in
/// C++ refuses compressed requests without this field.
pub(super) async fn server_compressed_unary(session: Session) -> CaseResult {
    let mut client = session.official_accepting();
    for (response_compressed, compressed) in [(YES, true), (NO, false)] {
        let reply = client.unary_call(SimpleRequest { response_compressed, ..large() }).await?;
        ensure_eq("the flag of the reply", flags(reply.extensions()).0, vec![compressed])?;
        ensure_zeros("the reply", &reply.into_inner().payload.unwrap_or_default().body, 314_159)?;
    }
    Ok(())
}

pub(super) async fn client_compressed_streaming(session: Session) -> CaseResult {
    let mut client = session.official_compressed();
    let message =
        |size, expect_compressed| StreamingInputCallRequest { payload: zeros(size), expect_compressed };
    let probe = with_flags(tokio_stream::iter([message(27_182, YES)]), [false]);
    let refused = client.streaming_input_call(probe).await;
    ensure_code(
        "the probe, plain while the server is to expect it compressed",
        refused,
        Code::InvalidArgument,
    )?;

    let messages = tokio_stream::iter([message(27_182, YES), message(45_904, NO)]);
    let reply = client.streaming_input_call(with_flags(messages, [true, false])).await?;
    ensure_eq("the flags of the requests", flags(reply.extensions()).1, vec![true, false])?;
    ensure_eq("bytes that the server counted", reply.into_inner().aggregated_payload_size, 73_086)
}

pub(super) async fn server_compressed_streaming(session: Session) -> CaseResult {
    let sizes = [(31_415, true), (92_653, false)];
    let parameters = sizes.map(|(size, value)| ResponseParameters {
        size,
        compressed: Some(BoolValue { value }),
        ..Default::default()
    });
    let request = StreamingOutputCallRequest { response_parameters: parameters.into(), ..Default::default() };
    let reply = session.official_accepting().streaming_output_call(request).await?;
    let extensions = reply.extensions().clone();
    let mut replies = reply.into_inner();
    for (index, (size, _)) in sizes.into_iter().enumerate() {
        let what = format!("reply {index}");
        let reply = next_reply(&what, &mut replies).await?;
        ensure_reply(&what, reply, size as usize)?;
    }
    ensure_end(&mut replies).await?;
    ensure_eq("the flags of the replies", flags(&extensions).0, vec![true, false])
}
