//! The address that two queue pairs exchange to connect: see [`Address`]. Decoding takes any bytes, and never panics.

use std::net::{Ipv6Addr, SocketAddrV6};

use ibverbs_sys as sys;

use crate::ibverbs::device::gid::GidKind;
use crate::ibverbs::device::port::mtu_bytes;
use crate::ibverbs::iwarp::listener::Listener;
use crate::{QueuePairAddress, VerbsError};

/// The address of a queue pair. All numbers are sent in network order:
///
/// | bytes | InfiniBand, RoCE | iWARP |
/// |---|---|---|
/// | 0 | version, 1 | version, 1 |
/// | 1 | 1 InfiniBand, 2 RoCE version 2, 4 RoCE version 1 | 3 |
/// | 2 | path MTU code, 1–5 | 0 |
/// | 3 | RDMA READs that can be served at a time | RDMA READs that can be served at a time |
/// | 4–7 | queue pair number, 24 bits | 0 |
/// | 8–11 | first packet sequence number, 24 bits | 0 |
/// | 12–13 | LID, 0 on RoCE | TCP port |
/// | 14–29 | GID | IPv6 address, or a mapped IPv4 one |
/// | 30–37 | 0 | token that names the queue pair |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// A queue pair of a port on InfiniBand or Ethernet.
    InfiniBand(Path),
    /// A queue pair behind a listener that connects by TCP.
    Iwarp(Listener),
}

/// A queue pair on InfiniBand or RoCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Path {
    pub(crate) packets: GidKind,
    pub(crate) mtu: sys::ibv_mtu,
    pub(crate) reads: u8,
    pub(crate) number: u32,
    pub(crate) first_packet: u32,
    pub(crate) lid: u16,
    pub(crate) gid: [u8; 16],
}

const VERSION: u8 = 1;
const LENGTH: usize = 38;
/// Queue pair and packet sequence numbers have 24 bits.
pub(crate) const NUMBERS: u32 = (1 << 24) - 1;

impl Address {
    pub(crate) fn decode(address: &QueuePairAddress) -> Result<Self, VerbsError> {
        let bytes = address.as_bytes();
        Self::parse(bytes).map_err(|reason| VerbsError::BadAddress(reason.into()))
    }

    fn parse(bytes: &[u8]) -> Result<Self, &'static str> {
        let bytes: &[u8; LENGTH] =
            bytes.try_into().map_err(|_| "wrong length for a queue pair of ibverbs")?;
        let [version, transport, mtu, reads, rest @ ..] = bytes;
        if *version != VERSION {
            return Err("unknown version");
        }
        let (number, rest) = take(rest);
        let (first_packet, rest) = take(rest);
        let (lid_or_port, rest) = take(rest);
        let (gid, rest) = take::<16>(rest);
        let (token, _) = take(rest);
        let (number, first_packet) = (u32::from_be_bytes(number), u32::from_be_bytes(first_packet));
        let lid_or_port = u16::from_be_bytes(lid_or_port);
        let all_zero = gid == [0; 16];
        let multicast = gid[0] == 0xff;
        match transport {
            1 | 2 | 4 => {
                let packets = match transport {
                    1 => GidKind::InfiniBand,
                    2 => GidKind::RoceV2,
                    _ => GidKind::RoceV1,
                };
                if !(2..=NUMBERS).contains(&number) || first_packet > NUMBERS {
                    return Err("a queue pair or packet number out of range");
                }
                if mtu_bytes((*mtu).into()).is_none() {
                    return Err("unknown path MTU");
                }
                if multicast || (all_zero && (packets != GidKind::InfiniBand || lid_or_port == 0)) {
                    return Err("not the address of one port");
                }
                Ok(Self::InfiniBand(Path {
                    packets,
                    mtu: (*mtu).into(),
                    reads: *reads,
                    number,
                    first_packet,
                    lid: lid_or_port,
                    gid,
                }))
            }
            3 => {
                if multicast || all_zero || lid_or_port == 0 {
                    return Err("not the address of a listener");
                }
                let socket = SocketAddrV6::new(Ipv6Addr::from(gid), lid_or_port, 0, 0);
                Ok(Self::Iwarp(Listener { reads: *reads, socket, token: u64::from_be_bytes(token) }))
            }
            _ => Err("unknown transport"),
        }
    }

    fn to_bytes(self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        bytes[0] = VERSION;
        match self {
            Self::InfiniBand(path) => {
                bytes[1] = match path.packets {
                    GidKind::InfiniBand => 1,
                    GidKind::RoceV2 => 2,
                    GidKind::RoceV1 => 4,
                };
                bytes[2] = path.mtu as u8;
                bytes[3] = path.reads;
                bytes[4..8].copy_from_slice(&path.number.to_be_bytes());
                bytes[8..12].copy_from_slice(&path.first_packet.to_be_bytes());
                bytes[12..14].copy_from_slice(&path.lid.to_be_bytes());
                bytes[14..30].copy_from_slice(&path.gid);
            }
            Self::Iwarp(listener) => {
                bytes[1] = 3;
                bytes[3] = listener.reads;
                bytes[12..14].copy_from_slice(&listener.socket.port().to_be_bytes());
                bytes[14..30].copy_from_slice(&listener.socket.ip().octets());
                bytes[30..38].copy_from_slice(&listener.token.to_be_bytes());
            }
        }
        bytes
    }
}

impl From<Address> for QueuePairAddress {
    fn from(address: Address) -> Self {
        let bytes = address.to_bytes();
        // 38 bytes are within the limit.
        Self::new(bytes).unwrap_or_else(|| unreachable!("{} bytes", bytes.len()))
    }
}

/// Returns the first bytes and the rest. Missing bytes are zero.
fn take<const COUNT: usize>(bytes: &[u8]) -> ([u8; COUNT], &[u8]) {
    match bytes.split_first_chunk() {
        Some((first, rest)) => (*first, rest),
        None => ([0; COUNT], &[]),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn path() -> Path {
        Path {
            packets: GidKind::RoceV2,
            mtu: sys::IBV_MTU_1024,
            reads: 16,
            number: 0x12_3456,
            first_packet: NUMBERS,
            lid: 7,
            gid: Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0x0a4d, 1).octets(),
        }
    }

    fn listener() -> Listener {
        let socket = SocketAddrV6::new(Ipv6Addr::LOCALHOST, 4791, 0, 0);
        Listener { reads: 3, socket, token: u64::MAX - 5 }
    }

    #[test]
    fn an_address_survives_the_round_trip() {
        for address in [
            Address::InfiniBand(path()),
            Address::InfiniBand(Path { packets: GidKind::RoceV1, ..path() }),
            Address::InfiniBand(Path { packets: GidKind::InfiniBand, ..path() }),
            Address::InfiniBand(Path { packets: GidKind::InfiniBand, gid: [0; 16], ..path() }),
            Address::Iwarp(listener()),
        ] {
            assert_eq!(Address::decode(&address.into()).unwrap(), address);
        }
    }

    #[test]
    fn an_address_that_names_no_queue_pair_is_refused() {
        let gid = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).octets();
        for address in [
            Address::InfiniBand(Path { number: NUMBERS + 1, ..path() }),
            // Numbers 0 and 1 belong to management.
            Address::InfiniBand(Path { number: 1, ..path() }),
            Address::InfiniBand(Path { first_packet: u32::MAX, ..path() }),
            Address::InfiniBand(Path { mtu: 6, ..path() }),
            Address::InfiniBand(Path { gid: [0; 16], ..path() }),
            Address::InfiniBand(Path { gid, ..path() }),
            Address::InfiniBand(Path { packets: GidKind::InfiniBand, gid: [0; 16], lid: 0, ..path() }),
            Address::Iwarp(Listener {
                socket: SocketAddrV6::new(Ipv6Addr::LOCALHOST, 0, 0, 0),
                ..listener()
            }),
        ] {
            let error = Address::decode(&address.into()).unwrap_err();
            assert!(matches!(error, VerbsError::BadAddress(_)), "{address:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_address_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64), flip in 0..304usize) {
            let _ = Address::parse(&bytes);
            let mut good = Address::InfiniBand(path()).to_bytes();
            good[flip / 8] ^= 1 << (flip % 8);
            if let Ok(address) = Address::parse(&good) {
                prop_assert_eq!(Address::parse(&address.to_bytes()), Ok(address));
            }
        }
    }
}
