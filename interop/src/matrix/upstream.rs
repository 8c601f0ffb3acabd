//! Cases that fail without any of our transport, and why. An entry that does not fail any more is an error, so that the list
//! stays true.

use crate::direction::Side;
use crate::peer::Peer;

struct Known {
    peer: Peer,
    side: Side,
    case: &'static str,
    reason: &'static str,
}

const UNSEEN: &str = "the library does not show a server whether a message came compressed";
const UNCOMPRESSED: &str = "the library's server never compresses a reply";
const UNASKED: &str =
    "the library's server compresses the replies to what came compressed, all of them, and no others";
const ZEROS: &str = "the official server looks at nothing that has to do with compression";
const NO_ENCODING: &str =
    "the library's server refuses an encoding it doesn't know with INTERNAL; gRPC has UNIMPLEMENTED for that";

const KNOWN: [Known; 16] = [
    known(Peer::Python, Side::Server, "client_compressed_unary", UNSEEN),
    known(Peer::Python, Side::Server, "client_compressed_streaming", UNSEEN),
    known(Peer::Python, Side::Server, "checked_zstd", NO_ENCODING),
    known(Peer::Node, Side::Server, "checked_gzip", UNCOMPRESSED),
    known(Peer::Node, Side::Server, "client_compressed_unary", UNSEEN),
    known(Peer::Node, Side::Server, "client_compressed_streaming", UNSEEN),
    known(Peer::Node, Side::Server, "server_compressed_unary", UNCOMPRESSED),
    known(Peer::Node, Side::Server, "server_compressed_streaming", UNCOMPRESSED),
    known(Peer::Go, Side::Server, "client_compressed_unary", UNSEEN),
    known(Peer::Go, Side::Server, "client_compressed_streaming", UNSEEN),
    known(Peer::Go, Side::Server, "server_compressed_unary", UNASKED),
    known(Peer::Go, Side::Server, "server_compressed_streaming", UNASKED),
    known(Peer::Ruby, Side::Server, "client_compressed_unary", ZEROS),
    known(Peer::Ruby, Side::Server, "client_compressed_streaming", ZEROS),
    known(Peer::Ruby, Side::Server, "server_compressed_unary", ZEROS),
    known(Peer::Ruby, Side::Server, "server_compressed_streaming", ZEROS),
];

const fn known(peer: Peer, side: Side, case: &'static str, reason: &'static str) -> Known {
    Known { peer, side, case, reason }
}

/// Why the case fails with the peer over plain TCP and tonic's own transport, if that is known.
pub(crate) fn reason(peer: Peer, side: Side, case: &str) -> Option<&'static str> {
    let known = KNOWN.iter().find(|known| (known.peer, known.side, known.case) == (peer, side, case));
    known.map(|known| known.reason)
}
