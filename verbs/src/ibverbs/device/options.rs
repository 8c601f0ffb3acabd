//! Which device, port and address a user asks for, and which ones are taken: the path of the queue pairs.

use ibverbs_sys as sys;

use super::list::{Gid, GidKind, Port, PortState, mtu_bytes, mtu_code};
use crate::VerbsError;

/// The device, port and address to use. An option that is `None` is chosen automatically.
///
/// ```
/// use tonic_rdma_verbs::ibverbs::OpenOptions;
///
/// let options = OpenOptions { device: Some("mlx5_0".into()), port: Some(1), ..OpenOptions::default() };
/// assert_eq!(options.gid_index, None);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// The device's name; otherwise the first device that has a usable port.
    pub device: Option<String>,
    /// The port's number, from 1; otherwise the first port that is active.
    pub port: Option<u8>,
    /// Index in the port's GID table; otherwise the best one, see
    /// [`Port::best_gid`](super::super::Port::best_gid).
    pub gid_index: Option<u32>,
    /// Largest path MTU to offer to peers, in bytes (256, 512, 1024, 2048 or 4096); otherwise the path MTU of
    /// the port.
    pub mtu: Option<u16>,
    /// Whether to open windows on a device that does not check their bounds, as Soft-RoCE. This is for tests of
    /// windows: a peer with a window then reaches the whole region.
    pub inexact_windows: bool,
}

pub(super) fn choose_port(device: &str, ports: Vec<Port>, wanted: Option<u8>) -> Result<Port, VerbsError> {
    let describe = |port: &Port| format!("{} ({})", port.number, port.state);
    let described: Vec<_> = ports.iter().map(describe).collect();
    let chosen = match wanted {
        Some(wanted) => {
            let found = ports.into_iter().find(|port| port.number == wanted);
            found.ok_or_else(|| {
                VerbsError::not_found("port", format!("{wanted} of {device}"), one_of("port", &described))
            })?
        }
        None => {
            let found = ports.into_iter().find(|port| port.state == PortState::Active);
            found.ok_or_else(|| {
                VerbsError::unusable(format!("{device} has no active port: {}", described.join(", ")))
            })?
        }
    };
    if chosen.state != PortState::Active {
        return Err(VerbsError::unusable(format!("port {} of {device} is {}", chosen.number, chosen.state)));
    }
    Ok(chosen)
}

pub(super) fn choose_gid(device: &str, port: &Port, wanted: Option<u32>) -> Result<Option<Gid>, VerbsError> {
    let Some(wanted) = wanted else { return Ok(port.best_gid().copied()) };
    let found = port.gids.iter().find(|gid| gid.index == wanted);
    found.copied().map(Some).ok_or_else(|| {
        VerbsError::not_found(
            "GID index",
            format!("{wanted} of port {} of {device}", port.number),
            one_of("index", &port.gids.iter().map(Gid::to_string).collect::<Vec<_>>()),
        )
    })
}

pub(super) fn choose_mtu(port: &Port, wanted: Option<u16>) -> Result<sys::ibv_mtu, VerbsError> {
    let active = mtu_code(port.active_mtu).unwrap_or(sys::IBV_MTU_1024);
    let Some(wanted) = wanted else { return Ok(active) };
    Ok(exact_mtu(wanted)?.min(active))
}

/// Returns the code of an MTU that must be one of the five.
pub(crate) fn exact_mtu(bytes: u16) -> Result<sys::ibv_mtu, VerbsError> {
    let code = mtu_code(bytes).filter(|&code| mtu_bytes(code) == Some(bytes));
    code.ok_or_else(|| VerbsError::limit("path MTU (256, 512, 1024, 2048 or 4096)", bytes.into(), 4096))
}

pub(super) fn one_of(what: &str, names: &[String]) -> String {
    if names.is_empty() { format!("no {what}") } else { names.join(", ") }
}

/// What a queue pair uses of its device: a port, an address, and a path MTU. They may change while the device
/// is open: an interface gets another address, a cable moves. Each queue pair keeps those of the time of its
/// [`to_init`](crate::QueuePair::to_init).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LocalPath {
    pub(crate) port: Port,
    pub(crate) gid: Option<Gid>,
    /// Path MTU that peers are offered, as a code.
    pub(crate) mtu: sys::ibv_mtu,
}

impl LocalPath {
    /// Chooses the address and the MTU of `port`, within `options`. `needs_address`: packets carry an
    /// address.
    pub(super) fn choose(
        device: &str,
        port: Port,
        options: &OpenOptions,
        needs_address: bool,
    ) -> Result<Self, VerbsError> {
        let gid = choose_gid(device, &port, options.gid_index)?;
        if gid.is_none() && port.ethernet && needs_address {
            return Err(VerbsError::unusable(format!(
                "port {} of {device} has no GID: give its network interface an address",
                port.number
            )));
        }
        let mtu = choose_mtu(&port, options.mtu)?;
        Ok(Self { port, gid, mtu })
    }

    /// Returns the format of the packets of queue pairs.
    pub(crate) fn packets(&self) -> GidKind {
        match self.gid.map(|gid| gid.kind) {
            _ if !self.port.ethernet => GidKind::InfiniBand,
            Some(GidKind::RoceV1) => GidKind::RoceV1,
            _ => GidKind::RoceV2,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;
    use crate::VerbsErrorKind;
    use crate::ibverbs::device::list::GidKind;

    fn port(number: u8, state: PortState) -> Port {
        let address = Ipv6Addr::LOCALHOST;
        Port {
            number,
            state,
            ethernet: true,
            active_mtu: 1024,
            lid: 0,
            partition_keys: 1,
            max_message_size: 1 << 20,
            gids: vec![Gid { index: 3, address, kind: GidKind::RoceV2, interface: 1 }],
        }
    }

    #[test]
    fn the_first_active_port_is_taken() {
        let ports = || vec![port(1, PortState::Down), port(2, PortState::Active), port(3, PortState::Active)];
        assert_eq!(choose_port("x", ports(), None).unwrap().number, 2);
        assert_eq!(choose_port("x", ports(), Some(3)).unwrap().number, 3);
        let error = choose_port("x", ports(), Some(4)).unwrap_err().to_string();
        assert_eq!(error, "port 4 of x does not exist; there is 1 (down), 2 (active), 3 (active)");
        assert_eq!(choose_port("x", ports(), Some(1)).unwrap_err().to_string(), "port 1 of x is down");
        let error = choose_port("x", vec![port(1, PortState::Down)], None).unwrap_err().to_string();
        assert_eq!(error, "x has no active port: 1 (down)");
    }

    #[test]
    fn a_gid_index_that_does_not_exist_is_named() {
        let port = port(1, PortState::Active);
        assert_eq!(choose_gid("x", &port, None).unwrap().unwrap().index, 3);
        let error = choose_gid("x", &port, Some(9)).unwrap_err().to_string();
        assert_eq!(error, "GID index 9 of port 1 of x does not exist; there is 3 (::1, RoCE v2)");
    }

    #[test]
    fn an_mtu_is_one_of_five_and_not_above_the_port() {
        let port = port(1, PortState::Active);
        assert_eq!(choose_mtu(&port, None).unwrap(), sys::IBV_MTU_1024);
        assert_eq!(choose_mtu(&port, Some(512)).unwrap(), sys::IBV_MTU_512);
        assert_eq!(choose_mtu(&port, Some(4096)).unwrap(), sys::IBV_MTU_1024);
        assert_eq!(choose_mtu(&port, Some(1500)).unwrap_err().kind(), VerbsErrorKind::Limit);
    }
}

#[cfg(test)]
mod local_path_tests {
    use super::*;
    use crate::ibverbs::device::list::PortState;

    #[test]
    fn an_ethernet_port_needs_an_address_unless_tcp_carries_the_data() {
        let port = |ethernet| Port {
            number: 2,
            state: PortState::Active,
            ethernet,
            active_mtu: 1024,
            lid: 0,
            partition_keys: 1,
            max_message_size: 1,
            gids: Vec::new(),
        };
        let choose = |ethernet, needs| LocalPath::choose("x", port(ethernet), &OpenOptions::default(), needs);
        let error = choose(true, true).unwrap_err().to_string();
        assert_eq!(error, "port 2 of x has no GID: give its network interface an address");
        assert_eq!(choose(true, false).unwrap().packets(), GidKind::RoceV2);
        assert_eq!(choose(false, true).unwrap().packets(), GidKind::InfiniBand);
    }
}
