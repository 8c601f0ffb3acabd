//! Compression of single messages. tonic compresses all messages of a call or none, and returns them decompressed. The official
//! cases need more, so the services here read the flag before each message.
//!
//! They do not change the content of a message, or the result of a call.

mod flags;
mod plain;

pub(crate) use flags::Flags;

use http_body_util::BodyExt as _;
use tonic::body::Body;

type Request = http::Request<Body>;
type Response = http::Response<Body>;

/// Flags of the received messages: in a request's extensions on a server, in a response's extensions on a client.
#[derive(Clone, Debug)]
pub(crate) struct Received(pub(crate) Flags);

/// Flags of the sent messages, in a response's extensions on a client.
#[derive(Clone, Debug)]
pub(crate) struct Sent(pub(crate) Flags);

/// Flags for the messages to send, in order, if compression is on. A client puts them into the extensions of a request, a server
/// into those of a response. Messages without a flag are sent in tonic's way.
#[derive(Clone, Debug)]
pub(crate) struct Wanted(pub(crate) Flags);

/// Makes a call of a client. The request may have [`Wanted`] among its extensions, and the response has [`Received`] and [`Sent`].
pub(crate) async fn at_client<E>(
    mut request: Request,
    call: impl AsyncFnOnce(Request) -> Result<Response, E>,
) -> Result<Response, E> {
    if let Some(Wanted(wanted)) = request.extensions_mut().remove::<Wanted>() {
        request = request.map(|body| as_wanted(body, wanted));
    }
    let (sent, received) = (Flags::default(), Flags::default());
    let observed_request = request.map(|body| observed(body, sent.clone()));
    let mut response = call(observed_request).await?;
    response.extensions_mut().insert(Sent(sent));
    response.extensions_mut().insert(Received(received.clone()));
    Ok(response.map(|body| observed(body, received)))
}

/// Answers a call at a server. The request has [`Received`] among its extensions, and the response may have [`Wanted`].
pub(crate) async fn at_server<E>(
    mut request: Request,
    answer: impl AsyncFnOnce(Request) -> Result<Response, E>,
) -> Result<Response, E> {
    let received = Flags::default();
    request.extensions_mut().insert(Received(received.clone()));
    let mut response = answer(request.map(|body| observed(body, received))).await?;
    Ok(match response.extensions_mut().remove::<Wanted>() {
        Some(Wanted(wanted)) => response.map(|body| as_wanted(body, wanted)),
        None => response,
    })
}

/// Returns a body that adds the flags of its messages to `flags`.
fn observed(body: Body, flags: Flags) -> Body {
    let mut scanner = flags::Scanner::new(flags);
    Body::new(body.map_frame(move |frame| {
        if let Some(data) = frame.data_ref() {
            scanner.scan(data);
        }
        frame
    }))
}

/// Returns a body that decompresses the messages whose flag in `wanted` is false.
fn as_wanted(body: Body, wanted: Flags) -> Body {
    Body::new(body.map_frame(move |frame| frame.map_data(|data| plain::as_wanted(data, &wanted))))
}
