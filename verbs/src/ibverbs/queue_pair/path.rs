//! The settings of a connection: the address that two queue pairs exchange ([`Address`]), `PathSettings` as
//! the device takes them, and the attributes that the device reports afterwards. Decoding an address takes
//! any bytes, and never panics.

use std::net::{Ipv6Addr, SocketAddrV6};

use ibverbs_sys as sys;

use crate::ibverbs::device::Device;
use crate::ibverbs::device::list::{Gid, GidKind, Port, mtu_bytes};
use crate::ibverbs::device::options::{LocalPath, exact_mtu};
use crate::ibverbs::iwarp::library::Listener;
use crate::versions::Versions;
use crate::{Context as _, PathSettings, QueuePairAddress, VerbsError};

/// A change of a queue pair's attributes: the values, and the mask of those that count.
pub(crate) struct Change {
    pub(crate) attributes: sys::ibv_qp_attr,
    pub(crate) mask: sys::ibv_qp_attr_mask,
}

/// Most routers that a packet may pass.
const HOP_LIMIT: u8 = 64;

/// Checks that the port supports the settings.
pub(crate) fn check_settings(settings: &PathSettings, port: &Port) -> Result<(), VerbsError> {
    let keys = u64::from(port.partition_keys.max(1)) - 1;
    let limits = [
        ("RNR retries", u64::from(settings.rnr_retry), 7),
        ("minimum RNR timer", settings.min_rnr_timer.into(), 31),
        ("transport timeout", settings.timeout.into(), 31),
        ("transport retries", settings.retry_count.into(), 7),
        ("service level", settings.service_level.into(), 15),
        ("partition key index", settings.pkey_index.into(), keys),
    ];
    VerbsError::check_limits(limits)?;
    settings.mtu.map_or(Ok(()), |mtu| exact_mtu(mtu).map(|_| ()))
}

/// Returns the change from Reset to Init (IBA vol. 1, 10.3.1). [`to_rtr`] sets the partition key.
pub(crate) fn to_init(port: u8, rights: u32) -> Change {
    use sys::ibv_qp_attr_mask as mask;
    Change {
        attributes: sys::ibv_qp_attr {
            qp_state: sys::ibv_qp_state::IBV_QPS_INIT,
            pkey_index: 0,
            port_num: port,
            qp_access_flags: rights,
            ..Default::default()
        },
        mask: mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS,
    }
}

/// Returns the change from Init to Rtr: the peer's address, and what is accepted from the peer. Fails if the
/// peer's port is of another kind.
pub(crate) fn to_rtr(
    served_reads: u8,
    local: &LocalPath,
    peer: &Path,
    settings: &PathSettings,
) -> Result<Change, VerbsError> {
    use sys::ibv_qp_attr_mask as mask;
    check_packets(local.packets(), local.gid.as_ref(), peer)?;
    let ours = settings.mtu.map(exact_mtu).transpose()?.unwrap_or(local.mtu);
    Ok(Change {
        attributes: sys::ibv_qp_attr {
            qp_state: sys::ibv_qp_state::IBV_QPS_RTR,
            path_mtu: ours.min(local.mtu).min(peer.mtu),
            dest_qp_num: peer.number,
            rq_psn: peer.first_packet,
            // The peer chooses how many are outstanding. It knows this limit from our address.
            max_dest_rd_atomic: served_reads,
            min_rnr_timer: settings.min_rnr_timer,
            pkey_index: settings.pkey_index,
            ah_attr: route(&local.port, local.gid.as_ref(), peer, settings),
            ..Default::default()
        },
        mask: mask::IBV_QP_STATE
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER
            | mask::IBV_QP_PKEY_INDEX,
    })
}

/// Checks that packets of one format can go from our address to the peer's.
fn check_packets(ours: GidKind, gid: Option<&Gid>, peer: &Path) -> Result<(), VerbsError> {
    if ours != peer.packets {
        let choose =
            if ours == GidKind::InfiniBand || peer.packets == GidKind::InfiniBand { "" } else { CHOOSE };
        let reason = format!("its address is one of {}, ours of {ours}{choose}", peer.packets);
        return Err(VerbsError::unreachable(reason));
    }
    let family = |address: Ipv6Addr| if address.to_ipv4_mapped().is_some() { "IPv4" } else { "IPv6" };
    let theirs = Ipv6Addr::from(peer.gid);
    match gid.map(|gid| gid.address) {
        Some(gid) if ours == GidKind::RoceV2 && family(gid) != family(theirs) => {
            let (theirs_is, ours_is) = (family(theirs), family(gid));
            Err(VerbsError::unreachable(format!(
                "its address {theirs} is one of {theirs_is}, ours {gid} of {ours_is}{CHOOSE}"
            )))
        }
        _ => Ok(()),
    }
}

/// The advice for an address of the wrong kind.
const CHOOSE: &str = "; RDMA_GID_INDEX chooses another";

/// Returns the address vector. Ethernet needs a global route. InfiniBand needs one if the peer is in another
/// subnet, which the first half of its GID names.
fn route(port: &Port, gid: Option<&Gid>, peer: &Path, settings: &PathSettings) -> sys::ibv_ah_attr {
    let ours = gid.map(|gid| gid.address.octets());
    let far = ours.is_some_and(|ours| peer.gid != [0; 16] && ours[..8] != peer.gid[..8]);
    let global = port.ethernet || far;
    let mut route = sys::ibv_ah_attr {
        dlid: peer.lid,
        sl: settings.service_level,
        is_global: global.into(),
        port_num: port.number,
        ..Default::default()
    };
    if global {
        route.grh = sys::ibv_global_route {
            dgid: sys::ibv_gid { raw: peer.gid },
            flow_label: 0,
            // No GID table has more than 256 entries that an address vector could name.
            sgid_index: gid.map_or(0, |gid| gid.index as u8),
            hop_limit: HOP_LIMIT,
            traffic_class: settings.traffic_class,
        };
    }
    route
}

/// Returns the change from Rtr to Rts: the settings for sending, with at most `retries` retries, and `reads`
/// outstanding RDMA READs.
pub(crate) fn to_rts(first_packet: u32, retries: u8, reads: u8, settings: &PathSettings) -> Change {
    use sys::ibv_qp_attr_mask as mask;
    Change {
        attributes: sys::ibv_qp_attr {
            qp_state: sys::ibv_qp_state::IBV_QPS_RTS,
            timeout: settings.timeout,
            retry_cnt: settings.retry_count.min(retries),
            rnr_retry: settings.rnr_retry,
            sq_psn: first_packet,
            max_rd_atomic: reads,
            ..Default::default()
        },
        mask: mask::IBV_QP_STATE
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_MAX_QP_RD_ATOMIC,
    }
}

/// Returns how many RDMA READs this side may have outstanding.
pub(crate) fn outstanding_reads(device: &Device, settings: &PathSettings) -> u8 {
    let most = device.attributes().max_outstanding_reads.min(u8::MAX.into()) as u8;
    settings.outstanding_reads.min(most)
}

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

/// The versions of the address of a queue pair. There was none before 1.
const VERSIONS: Versions = Versions::only(1);
const LENGTH: usize = 38;
/// Queue pair and packet sequence numbers have 24 bits.
pub(crate) const NUMBERS: u32 = (1 << 24) - 1;

impl Address {
    pub(crate) fn decode(address: &QueuePairAddress) -> Result<Self, VerbsError> {
        let bytes = address.as_bytes();
        let version = bytes.first().copied().unwrap_or(0);
        if !VERSIONS.speaks(version.into()) {
            return Err(VerbsError::bad_address(format!(
                "the peer's device has version {version} of addresses, this one has {VERSIONS}"
            )));
        }
        Self::parse(bytes).map_err(VerbsError::bad_address)
    }

    fn parse(bytes: &[u8]) -> Result<Self, &'static str> {
        let bytes: &[u8; LENGTH] =
            bytes.try_into().map_err(|_| "wrong length for a queue pair of ibverbs")?;
        let [_, transport, mtu, reads, rest @ ..] = bytes;
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
        bytes[0] = VERSIONS.newest as u8;
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
    use super::*;
    use crate::ibverbs::device::list::PortState;

    fn port(ethernet: bool) -> Port {
        Port {
            number: 1,
            state: PortState::Active,
            ethernet,
            active_mtu: 4096,
            lid: 0,
            partition_keys: 2,
            max_message_size: 1,
            gids: Vec::new(),
        }
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let good = PathSettings { pkey_index: 1, mtu: Some(4096), ..PathSettings::default() };
        check_settings(&good, &port(true)).unwrap();
        let bad = [
            (PathSettings { rnr_retry: 8, ..good.clone() }, "RNR retries: asked for 8, the device has 7"),
            (
                PathSettings { timeout: 32, ..good.clone() },
                "transport timeout: asked for 32, the device has 31",
            ),
            (PathSettings { service_level: 16, ..good.clone() }, "service level: asked for 16"),
            (
                PathSettings { pkey_index: 2, ..good.clone() },
                "partition key index: asked for 2, the device has 1",
            ),
            (
                PathSettings { mtu: Some(1500), ..good },
                "path MTU (256, 512, 1024, 2048 or 4096): asked for 1500",
            ),
        ];
        for (settings, expected) in bad {
            let error = check_settings(&settings, &port(true)).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn settings_reach_the_queue_pair() {
        use sys::ibv_qp_attr_mask as mask;
        let settings = PathSettings {
            outstanding_reads: 5,
            rnr_retry: 2,
            min_rnr_timer: 9,
            timeout: 17,
            retry_count: 4,
            service_level: 3,
            traffic_class: 96,
            pkey_index: 1,
            mtu: Some(512),
        };
        let gid = Gid { index: 5, address: Ipv6Addr::LOCALHOST, kind: GidKind::RoceV2, interface: 0 };
        let local = LocalPath { port: port(true), gid: Some(gid), mtu: sys::IBV_MTU_1024 };
        let peer = Path {
            packets: GidKind::RoceV2,
            mtu: sys::IBV_MTU_2048,
            reads: 1,
            number: 77,
            first_packet: 88,
            lid: 0,
            gid: gid.address.octets(),
        };
        let has = |change: &Change, all: &[sys::ibv_qp_attr_mask]| {
            assert_eq!(change.mask, all.iter().fold(mask::IBV_QP_STATE, |sum, one| sum | *one));
        };
        let change = to_init(3, 7);
        has(&change, &[mask::IBV_QP_PKEY_INDEX, mask::IBV_QP_PORT, mask::IBV_QP_ACCESS_FLAGS]);
        assert_eq!((change.attributes.port_num, change.attributes.qp_access_flags), (3, 7));

        let change = to_rtr(6, &local, &peer, &settings).unwrap();
        let own = [mask::IBV_QP_AV, mask::IBV_QP_PATH_MTU, mask::IBV_QP_DEST_QPN, mask::IBV_QP_RQ_PSN];
        let reads = [mask::IBV_QP_MAX_DEST_RD_ATOMIC, mask::IBV_QP_MIN_RNR_TIMER, mask::IBV_QP_PKEY_INDEX];
        has(&change, &[&own[..], &reads[..]].concat());
        let to = &change.attributes;
        assert_eq!((to.path_mtu, to.dest_qp_num, to.rq_psn), (sys::IBV_MTU_512, 77, 88));
        assert_eq!((to.max_dest_rd_atomic, to.min_rnr_timer, to.pkey_index), (6, 9, 1));
        assert_eq!((to.ah_attr.sl, to.ah_attr.grh.traffic_class, to.ah_attr.grh.sgid_index), (3, 96, 5));
        for (ours, theirs) in [(sys::IBV_MTU_256, sys::IBV_MTU_2048), (sys::IBV_MTU_2048, sys::IBV_MTU_256)] {
            let (local, peer) = (LocalPath { mtu: ours, ..local.clone() }, Path { mtu: theirs, ..peer });
            let change = to_rtr(6, &local, &peer, &PathSettings::default()).unwrap();
            assert_eq!(change.attributes.path_mtu, sys::IBV_MTU_256, "the smaller one is taken");
        }

        let change = to_rts(99, 3, 5, &settings);
        let retries = [mask::IBV_QP_TIMEOUT, mask::IBV_QP_RETRY_CNT, mask::IBV_QP_RNR_RETRY];
        has(&change, &[&retries[..], &[mask::IBV_QP_SQ_PSN, mask::IBV_QP_MAX_QP_RD_ATOMIC]].concat());
        let to = &change.attributes;
        assert_eq!((to.timeout, to.retry_cnt, to.rnr_retry), (17, 3, 2), "the device has 3 retries at most");
        assert_eq!((to.sq_psn, to.max_rd_atomic), (99, 5));
        assert_eq!(to_rts(99, 7, 5, &settings).attributes.retry_cnt, 4);
    }

    #[test]
    fn addresses_of_different_kinds_are_told_apart() {
        let gid = |address: &str| {
            let kind = GidKind::RoceV2;
            Gid { index: 0, address: address.parse().unwrap(), kind, interface: 0 }
        };
        let peer = |packets, address: &str| Path {
            packets,
            mtu: 3,
            reads: 1,
            number: 2,
            first_packet: 0,
            lid: 0,
            gid: gid(address).address.octets(),
        };
        let check = |ours, address: &str, peer| {
            check_packets(ours, Some(&gid(address)), &peer).map_err(|error| error.to_string())
        };
        use GidKind::{InfiniBand, RoceV1, RoceV2};
        let (ipv4, ipv6) = ("::ffff:10.0.0.1", "fe80::1");
        for (link, address) in [(RoceV2, ipv4), (RoceV2, ipv6), (RoceV1, ipv6), (InfiniBand, ipv6)] {
            assert_eq!(check(link, address, peer(link, address)), Ok(()));
        }
        assert_eq!(check(RoceV1, ipv4, peer(RoceV1, ipv6)), Ok(()), "frames carry GIDs of any form");
        let error = check(RoceV2, ipv4, peer(RoceV2, ipv6)).unwrap_err();
        assert!(error.ends_with(
            "its address fe80::1 is one of IPv6, ours ::ffff:10.0.0.1 of IPv4; RDMA_GID_INDEX chooses another"
        ));
        let error = check(RoceV2, ipv4, peer(RoceV1, ipv4)).unwrap_err();
        assert!(
            error.ends_with("one of RoCE v1, ours of RoCE v2; RDMA_GID_INDEX chooses another"),
            "{error}"
        );
        let error = check(InfiniBand, ipv6, peer(RoceV2, ipv4)).unwrap_err();
        assert!(error.ends_with("its address is one of RoCE v2, ours of InfiniBand"), "{error}");
    }

    #[test]
    fn a_global_route_is_taken_on_ethernet_and_to_another_subnet() {
        let gid = |subnet: u16| Gid {
            index: 5,
            address: Ipv6Addr::new(subnet, 0, 0, 0, 0, 0, 0, 9),
            kind: GidKind::InfiniBand,
            interface: 0,
        };
        let settings = PathSettings { service_level: 3, traffic_class: 96, ..PathSettings::default() };
        let route = |ethernet, theirs: u16| {
            let raw = gid(theirs).address.octets();
            let packets = if ethernet { GidKind::RoceV2 } else { GidKind::InfiniBand };
            let peer = Path { packets, mtu: 3, reads: 1, number: 2, first_packet: 0, lid: 77, gid: raw };
            super::route(&port(ethernet), Some(&gid(1)), &peer, &settings)
        };
        for (ethernet, subnet, global) in [(true, 1, true), (false, 2, true), (false, 1, false)] {
            let route = route(ethernet, subnet);
            assert_eq!((route.is_global, route.sl, route.dlid, route.port_num), (global.into(), 3, 77, 1));
            let expected = if global { (5, 96, HOP_LIMIT) } else { (0, 0, 0) };
            assert_eq!((route.grh.sgid_index, route.grh.traffic_class, route.grh.hop_limit), expected);
        }
    }
}

#[cfg(test)]
mod address_tests {
    use proptest::prelude::*;

    use super::*;
    use crate::VerbsErrorKind;

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
            assert_eq!(error.kind(), VerbsErrorKind::InvalidAddress, "{address:?}: {error}");
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
