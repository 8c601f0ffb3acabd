//! Cases that are known to fail with a stock peer, without our transport too, with their messages and
//! reasons. An entry for a case that does not fail any more is an error, so that the list stays true.

use crate::direction::Role;
use crate::peer::Peer;

/// A case that is known to fail.
#[derive(Debug)]
pub(crate) struct KnownFailure {
    pub(crate) peer: Peer,
    pub(crate) role: Role,
    pub(crate) case: &'static str,
    /// Messages of the failure. One of them is in the failure of the control and of every direction.
    pub(crate) messages: &'static [&'static str],
    /// True if the case fails in some runs and passes in others, here or in the control.
    pub(crate) at_times: bool,
    pub(crate) reason: &'static str,
}

/// Message of our client if a server does not refuse a request that it has to refuse.
const NOT_REFUSED: &str =
    "plain while the server is to expect it compressed: expected InvalidArgument, found success";
/// Messages of our client if a reply comes plain and not compressed: in an official case, in our case, and in
/// a stream.
const PLAIN: &str = "the flag of the reply: expected [true], found [false]";
const PLAIN_OF_OURS: &str = "bytes received: expected [true], found [false]";
const PLAIN_IN_STREAM: &str = "the flags of the replies: expected [true, false], found [false, false]";
/// Message of our client if grpcio's server ends a call because of its encoding.
const BAD_ENCODING: &str =
    "a call that was to succeed ended with Internal (\"Error parsing 'grpc-encoding' metadata\")";
/// Messages of our client for the next call, if HTTP/2 has ended the connection because of the peer's frames.
const CONNECTION_ERROR: &[&str] = &[
    "a call that was to succeed ended with Internal (\"h2 protocol error: http2 error\": transport error: http2 error: \
     connection error detected: unspecific protocol error detected)",
    "a call that was to succeed ended with Cancelled (\"operation was canceled\": transport error: operation was \
     canceled: connection closed)",
];

const UNSEEN: &str = "the library does not show a server whether a message came compressed";
const UNCOMPRESSED: &str = "the library's server never compresses a reply";
const UNASKED: &str =
    "the library's server compresses the replies to compressed requests, and no other replies";
const ZEROS: &str = "the official server ignores all fields about compression";
const TWICE: &str = "C-core 1.51's server may send a call's trailers a second time after it has reset the stream, if the \
                     deadline passes while it ends the call; HTTP/2 ends the connection for that";
const NO_ENCODING: &str =
    "the library's server refuses an encoding it doesn't know with INTERNAL; gRPC has UNIMPLEMENTED for that";

const KNOWN: [KnownFailure; 18] = [
    server(Peer::Python, "client_compressed_unary", &[NOT_REFUSED], UNSEEN),
    server(Peer::Python, "client_compressed_streaming", &[NOT_REFUSED], UNSEEN),
    server(Peer::PythonRdma, "client_compressed_unary", &[NOT_REFUSED], UNSEEN),
    server(Peer::PythonRdma, "client_compressed_streaming", &[NOT_REFUSED], UNSEEN),
    server(Peer::Python, "checked_zstd", &[BAD_ENCODING], NO_ENCODING),
    server(Peer::Node, "checked_gzip", &[PLAIN_OF_OURS], UNCOMPRESSED),
    server(Peer::Node, "client_compressed_unary", &[NOT_REFUSED], UNSEEN),
    server(Peer::Node, "client_compressed_streaming", &[NOT_REFUSED], UNSEEN),
    server(Peer::Node, "server_compressed_unary", &[PLAIN], UNCOMPRESSED),
    server(Peer::Node, "server_compressed_streaming", &[PLAIN_IN_STREAM], UNCOMPRESSED),
    server(Peer::Go, "server_compressed_unary", &[PLAIN], UNASKED),
    server(Peer::Go, "server_compressed_streaming", &[PLAIN_IN_STREAM], UNASKED),
    server(Peer::Ruby, "client_compressed_unary", &[NOT_REFUSED], ZEROS),
    server(Peer::Ruby, "client_compressed_streaming", &[NOT_REFUSED], ZEROS),
    server(Peer::Ruby, "server_compressed_unary", &[PLAIN], ZEROS),
    server(Peer::Ruby, "server_compressed_streaming", &[PLAIN_IN_STREAM], ZEROS),
    at_times(Peer::Ruby, "timeout_on_sleeping_server", CONNECTION_ERROR, TWICE),
    at_times(Peer::CppOfficial, "timeout_on_sleeping_server", CONNECTION_ERROR, TWICE),
];

type Messages = &'static [&'static str];

const fn server(peer: Peer, case: &'static str, messages: Messages, reason: &'static str) -> KnownFailure {
    KnownFailure { peer, role: Role::Server, case, messages, at_times: false, reason }
}

const fn at_times(peer: Peer, case: &'static str, messages: Messages, reason: &'static str) -> KnownFailure {
    KnownFailure { at_times: true, ..server(peer, case, messages, reason) }
}

/// Returns the entry of a case that is known to fail with the peer over plain TCP and tonic's own transport.
pub(crate) fn find(peer: Peer, role: Role, case: &str) -> Option<&'static KnownFailure> {
    KNOWN.iter().find(|known| (known.peer, known.role, known.case) == (peer, role, case))
}
