//! Compression message by message, which tonic neither shows nor offers: it compresses all messages of a call or none, and
//! hands them over decompressed. The official cases ask for more, so services here look at the flag in front of each message.
//!
//! Never changes what a message says, nor whether a call fails.

mod client;
mod flags;
mod plain;
mod server;

pub(crate) use client::ClientCompression;
pub(crate) use flags::Flags;
pub(crate) use server::ServerCompression;

use http_body_util::BodyExt as _;
use tonic::body::Body;

/// Flags of the messages received: in a request's extensions on a server, in a response's on a client.
#[derive(Clone, Debug)]
pub(crate) struct Received(pub(crate) Flags);

/// Flags of the messages sent, among a response's extensions on a client.
#[derive(Clone, Debug)]
pub(crate) struct Sent(pub(crate) Flags);

/// Which of the messages to send are to be compressed, in order, where compression is on at all. Goes into the extensions of
/// a request on a client, of a response on a server. Messages that it says nothing of are sent as tonic does.
#[derive(Clone, Debug)]
pub(crate) struct Wanted(pub(crate) Flags);

/// `body`, the flags of whose messages go to `flags` as they pass.
fn observed(body: Body, flags: Flags) -> Body {
    let mut scanner = flags::Scanner::new(flags);
    Body::new(body.map_frame(move |frame| {
        if let Some(data) = frame.data_ref() {
            scanner.scan(data);
        }
        frame
    }))
}

/// `body`, with those messages decompressed that are not wanted compressed.
fn as_wanted(body: Body, wanted: Flags) -> Body {
    Body::new(body.map_frame(move |frame| frame.map_data(|data| plain::as_wanted(data, &wanted))))
}
