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

const UNSEEN: &str = "its library does not show a server whether a message came compressed";

const UNHEARD: &str = "the library's server never compresses its replies";

const KNOWN: [Known; 4] = [
    known(Peer::Python, Side::Server, "client_compressed_unary", UNSEEN),
    known(Peer::Python, Side::Server, "client_compressed_streaming", UNSEEN),
    known(Peer::Node, Side::Server, "client_compressed_unary", UNSEEN),
    known(Peer::Node, Side::Server, "client_compressed_streaming", UNSEEN),
];

const fn known(peer: Peer, side: Side, case: &'static str, reason: &'static str) -> Known {
    Known { peer, side, case, reason }
}

/// Why the case fails with the peer over plain TCP and tonic's own transport, if that is known.
pub(crate) fn reason(peer: Peer, side: Side, case: &str) -> Option<&'static str> {
    let known = KNOWN.iter().find(|known| (known.peer, known.side, known.case) == (peer, side, case));
    known.map(|known| known.reason)
}
