//! Compression of single messages. tonic compresses all messages of a call or none, and returns them decompressed. The official
//! cases need more, so the services here read the flag before each message.
//!
//! They do not change the content of a message, or the result of a call.

mod client;
mod flags;
mod plain;
mod server;

pub(crate) use client::ClientCompression;
pub(crate) use flags::Flags;
pub(crate) use server::ServerCompression;

use http_body_util::BodyExt as _;
use tonic::body::Body;

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
