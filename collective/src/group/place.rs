//! Where a rank's server listens, so that all others reach it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

/// An address of documentation (RFC 5737). A socket that is connected to it has the address of this host's default route. Nothing
/// is sent.
const OUTSIDE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9);

/// Returns the addresses on which rank 0 listens. `address` is what the other ranks call, and `resolved` is what it means here.
///
/// Many hosts resolve their own name to a loopback address. Other hosts could not reach a server there, so the server listens
/// on all addresses.
pub(super) fn of_rank_0(address: &str, resolved: &[SocketAddr]) -> Vec<SocketAddr> {
    let Some(first) = resolved.first() else { return Vec::new() };
    if resolved.iter().all(|address| address.ip().is_loopback()) && !is_loopback(address) {
        return vec![SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), first.port())];
    }
    resolved.to_vec()
}

/// Returns the address on which another rank listens, with port 0: that of this host on the way to rank 0.
pub(super) fn of_other_rank(address: &str, resolved: &[SocketAddr]) -> io::Result<SocketAddr> {
    let mut local = Err(io::Error::other("the name has no address"));
    for remote in resolved {
        local = local_towards(*remote);
        if local.is_ok() {
            break;
        }
    }
    let local = local?;
    let ip = if local.is_loopback() && !is_loopback(address) {
        local_towards(OUTSIDE).unwrap_or(local)
    } else {
        local
    };
    Ok(SocketAddr::new(ip, 0))
}

/// Returns this host's address on the way to `remote`.
fn local_towards(remote: SocketAddr) -> io::Result<IpAddr> {
    let any: SocketAddr = if remote.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0_u16; 8], 0).into() };
    let socket = UdpSocket::bind(any)?;
    socket.connect(remote)?;
    Ok(socket.local_addr()?.ip())
}

/// Returns whether `host:port` says in words that it is for this host only.
fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::{of_other_rank, of_rank_0};
    use std::net::SocketAddr;

    fn at(address: &str) -> SocketAddr {
        address.parse().unwrap()
    }

    #[test]
    fn loopback_stays_loopback_if_it_was_asked_for() {
        for address in ["127.0.0.1:29000", "localhost:29000"] {
            let resolved = [at("127.0.0.1:29000")];
            assert_eq!(of_rank_0(address, &resolved), resolved);
            assert_eq!(of_other_rank(address, &resolved).unwrap(), at("127.0.0.1:0"));
        }
    }

    #[test]
    fn a_host_that_resolves_its_own_name_to_loopback_listens_on_all_addresses() {
        let resolved = [at("127.0.1.1:29000")];
        assert_eq!(of_rank_0("node1:29000", &resolved), [at("0.0.0.0:29000")]);
    }

    #[test]
    fn another_address_is_taken_as_it_is() {
        let resolved = [at("10.0.0.1:29000")];
        assert_eq!(of_rank_0("node1:29000", &resolved), resolved);
    }

    #[test]
    fn a_name_without_an_address_is_an_error() {
        assert!(of_other_rank("node1:29000", &[]).is_err());
    }
}
