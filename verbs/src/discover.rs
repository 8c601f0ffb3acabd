//! The devices of this machine, and the reasons why some can't be used.

use std::path::Path;
use std::sync::Arc;

use super::{Context, DeviceAttributes, VerbsError, soft};

/// A device of this machine.
#[derive(Debug)]
pub struct FoundDevice {
    /// The name: `soft0`, or the kernel's name, such as `mlx5_0`.
    pub name: String,
    /// The provider of the device: `soft` or `ibverbs`.
    pub provider: &'static str,
    /// The attributes of the device, or the reason why it can't be used, with advice.
    pub state: Result<DeviceAttributes, VerbsError>,
    /// Its ports; empty on the software device, and on a device that can't be opened.
    pub ports: Vec<FoundPort>,
}

/// A port of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundPort {
    /// Its number, from 1.
    pub number: u8,
    /// Its state: `active`, `down` and so on.
    pub state: String,
    /// The link layer: `InfiniBand` or `Ethernet`.
    pub link: &'static str,
    /// The active path MTU, in bytes.
    pub mtu: u16,
    /// Its addresses.
    pub gids: Vec<FoundGid>,
}

/// An address of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundGid {
    /// Index in the port's table, as `RDMA_GID_INDEX` takes it.
    pub index: u32,
    /// Address and kind, such as `::ffff:10.0.0.1 (RoCE v2)`.
    pub address: String,
    /// Whether this address is used if no setting names an index.
    pub chosen: bool,
}

/// Returns all devices that this process can see, the software device first.
///
/// ```
/// for device in tonic_rdma_verbs::devices() {
///     match &device.state {
///         Ok(attributes) => println!("{}: {} bytes inline", device.name, attributes.max_inline),
///         Err(reason) => println!("{} can't be used: {reason}", device.name),
///     }
/// }
/// ```
pub fn devices() -> Vec<FoundDevice> {
    let mut found = vec![software()];
    found.extend(hardware(&names(Path::new("/sys/class/infiniband"))));
    found
}

/// Opens a device by the name that [`devices`] shows.
///
/// ```
/// let device = tonic_rdma_verbs::open("soft0")?;
/// assert_eq!(device.attributes().provider, "soft");
/// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
/// ```
///
/// # Errors
/// - [`Unusable`](crate::VerbsErrorKind::Unusable) if this build has no provider for the device, or the
///   device can't be used.
/// - [`NoDevice`](crate::VerbsErrorKind::NoDevice) if there is no such device, or libibverbs is not
///   installed.
/// - [`System`](crate::VerbsErrorKind::System) if the system refuses.
pub fn open(name: &str) -> Result<Arc<dyn Context>, VerbsError> {
    if name == soft::NAME { soft::open() } else { open_hardware(name) }
}

fn software() -> FoundDevice {
    let state = soft::open().map(|context| context.attributes().clone());
    FoundDevice { name: soft::NAME.into(), provider: "soft", state, ports: Vec::new() }
}

/// Returns the names of the devices that the kernel has drivers for.
fn names(class: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(class) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Describes a device of the kernel that can't be used.
fn unusable(name: &str, reason: &'static str) -> FoundDevice {
    let state = Err(VerbsError::unusable(reason));
    FoundDevice { name: name.into(), provider: "ibverbs", state, ports: Vec::new() }
}

#[cfg(not(feature = "ibverbs"))]
const WITHOUT_PROVIDER: &str = "this build has no ibverbs provider (cargo feature ibverbs); the software device serves processes of this host";

#[cfg(not(feature = "ibverbs"))]
fn open_hardware(_name: &str) -> Result<Arc<dyn Context>, VerbsError> {
    Err(VerbsError::unusable(WITHOUT_PROVIDER))
}

#[cfg(not(feature = "ibverbs"))]
fn hardware(names: &[String]) -> Vec<FoundDevice> {
    names.iter().map(|name| unusable(name, WITHOUT_PROVIDER)).collect()
}

#[cfg(feature = "ibverbs")]
fn open_hardware(name: &str) -> Result<Arc<dyn Context>, VerbsError> {
    let options = super::ibverbs::OpenOptions { device: Some(name.into()), ..Default::default() };
    super::ibverbs::open(&options)
}

#[cfg(feature = "ibverbs")]
fn hardware(names: &[String]) -> Vec<FoundDevice> {
    use super::ibverbs::{Port, list};

    let found = |name: String, ports: Vec<Port>| {
        let state = open_hardware(&name).map(|context| context.attributes().clone());
        FoundDevice { name, provider: "ibverbs", state, ports: ports.iter().map(port).collect() }
    };
    let Ok(listed) = list() else {
        // The devices can't be listed, for example because libibverbs is missing. Opening a device then
        // fails, too, and its error has the reason.
        return names.iter().map(|name| found(name.clone(), Vec::new())).collect();
    };
    let mut found: Vec<FoundDevice> =
        listed.into_iter().map(|listed| found(listed.name, listed.ports.unwrap_or_default())).collect();
    let unlisted: Vec<&String> =
        names.iter().filter(|name| found.iter().all(|device| device.name != **name)).collect();
    let reason = "libibverbs has no driver for the device: install ibverbs-providers or the vendor's package";
    found.extend(unlisted.into_iter().map(|name| unusable(name, reason)));
    found
}

#[cfg(feature = "ibverbs")]
fn port(port: &super::ibverbs::Port) -> FoundPort {
    let best = port.best_gid().map(|gid| gid.index);
    let gid = |gid: &super::ibverbs::Gid| FoundGid {
        index: gid.index,
        address: format!("{} ({})", gid.address, gid.kind),
        chosen: best == Some(gid.index),
    };
    FoundPort {
        number: port.number,
        state: port.state.to_string(),
        link: if port.ethernet { "Ethernet" } else { "InfiniBand" },
        mtu: port.active_mtu,
        gids: port.gids.iter().map(gid).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_software_device_is_always_there() {
        let found = devices();
        let soft = &found[0];
        assert_eq!((soft.name.as_str(), soft.provider), ("soft0", "soft"));
        assert!(soft.state.as_ref().is_ok_and(|attributes| attributes.immediate));
    }

    #[test]
    fn devices_of_the_kernel_are_listed_with_the_reason() {
        let class = std::env::temp_dir().join(format!("tonic-rdma-class-{}", std::process::id()));
        for name in ["none_1", "none_0"] {
            std::fs::create_dir_all(class.join(name)).unwrap();
        }
        let names = names(&class);
        std::fs::remove_dir_all(&class).unwrap();
        assert_eq!(names, ["none_0", "none_1"]);
        let found = hardware(&names);
        assert!(
            names.iter().all(|name| found.iter().any(|device| device.name == *name && device.state.is_err()))
        );
        assert_eq!(super::names(&class), [""; 0]);
        assert!(open("none_0").is_err());
    }
}
