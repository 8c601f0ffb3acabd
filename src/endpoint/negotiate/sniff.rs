//! The kind of a peer, by its first bytes.

use crate::wire::hello::MAGIC;

/// The kind of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    /// Too few bytes so far.
    Unknown,
    /// A client of this crate.
    Rdma,
    /// A stock client: the HTTP/2 preface (RFC 9113, 3.4), or an HTTP/1 request. Both start with a method.
    Http,
    /// A stock client over TLS: a handshake record (RFC 8446, 5.1).
    Tls,
    /// None of these.
    Garbage,
}

/// Returns the kind of the peer that sent these first bytes.
pub(super) fn sniff(received: &[u8]) -> Peer {
    const TLS_HANDSHAKE: u8 = 22;
    const TLS_MAJOR: u8 = 3;
    match received {
        [] | [TLS_HANDSHAKE] => Peer::Unknown,
        [TLS_HANDSHAKE, TLS_MAJOR, ..] => Peer::Tls,
        _ if received.starts_with(&MAGIC) => Peer::Rdma,
        _ if MAGIC.starts_with(received) => Peer::Unknown,
        _ => method(received),
    }
}

/// Looks for an HTTP method and a space: `PRI ` of the HTTP/2 preface, `GET `, `OPTIONS `.
fn method(received: &[u8]) -> Peer {
    const LONGEST_METHOD: usize = 16;
    let letters = received.iter().take_while(|byte| byte.is_ascii_uppercase()).count();
    match received.get(letters) {
        _ if letters > LONGEST_METHOD => Peer::Garbage,
        None => Peer::Unknown,
        Some(b' ') if letters > 0 => Peer::Http,
        Some(_) => Peer::Garbage,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_a_peer_does_not_depend_on_the_number_of_bytes_that_have_arrived() {
        let peers: [(&[u8], Peer); 8] = [
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Peer::Http),
            (b"GET / HTTP/1.1\r\n", Peer::Http),
            (&[22, 3, 1, 2, 0, 1], Peer::Tls),
            (&MAGIC, Peer::Rdma),
            (&[0; 16], Peer::Garbage),
            (b"SSH-2.0-OpenSSH\r\n", Peer::Garbage),
            (&[22, 9], Peer::Garbage),
            (&[b'A'; 64], Peer::Garbage),
        ];
        for (bytes, expected) in peers {
            let verdicts: Vec<Peer> = (0..=bytes.len()).map(|length| sniff(&bytes[..length])).collect();
            let decided: Vec<&Peer> = verdicts.iter().skip_while(|peer| **peer == Peer::Unknown).collect();
            assert!(
                !decided.is_empty() && decided.iter().all(|peer| **peer == expected),
                "{bytes:?}: {verdicts:?}"
            );
        }
    }
}
