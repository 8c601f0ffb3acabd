//! Which devices there are, and why one can't be used.

use std::path::Path;

use std::sync::Arc;

use super::{Context, DeviceAttributes, VerbsError, soft};

/// A device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDevice {
    /// Its name: `soft0`, or what the kernel calls it, such as `mlx5_0`.
    pub name: String,
    /// The provider that drives it, or would.
    pub provider: &'static str,
    /// What it can do, or why it can't be used, with what to do about it.
    pub state: Result<DeviceAttributes, String>,
}

/// All devices that this process can see, the software device first.
pub fn devices() -> Vec<FoundDevice> {
    let mut found = vec![software()];
    found.extend(hardware(Path::new("/sys/class/infiniband")));
    found
}

/// Opens a device by the name that [`devices`] shows.
///
/// # Errors
/// There is no such device, or it can't be used.
pub fn open(name: &str) -> Result<Arc<dyn Context>, VerbsError> {
    if name == soft::NAME {
        return soft::open();
    }
    Err(VerbsError::Unusable(WITHOUT_PROVIDER.into()))
}

/// What a build without the feature says of devices that it can't drive.
const WITHOUT_PROVIDER: &str =
    "this build has no ibverbs provider; the software device serves processes of this host";

fn software() -> FoundDevice {
    let state = soft::open().map(|context| context.attributes().clone()).map_err(|error| error.to_string());
    FoundDevice { name: soft::attributes().name, provider: "soft", state }
}

/// Devices that the kernel has drivers for.
fn hardware(class: &Path) -> Vec<FoundDevice> {
    let Ok(entries) = std::fs::read_dir(class) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let unusable = |name| FoundDevice { name, provider: "ibverbs", state: Err(WITHOUT_PROVIDER.into()) };
    names.into_iter().map(unusable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_software_device_is_always_there() {
        let found = devices();
        let soft = &found[0];
        assert_eq!((soft.name.as_str(), soft.provider), ("soft0", "soft"));
        assert_eq!(soft.state.as_ref().map(|attributes| attributes.immediate), Ok(true));
    }

    #[test]
    fn devices_of_the_kernel_are_listed_with_the_reason() {
        let class = std::env::temp_dir().join(format!("tonic-rdma-class-{}", std::process::id()));
        for name in ["mlx5_1", "mlx5_0"] {
            std::fs::create_dir_all(class.join(name)).unwrap();
        }
        let found = hardware(&class);
        std::fs::remove_dir_all(&class).unwrap();
        assert_eq!(found.iter().map(|device| device.name.as_str()).collect::<Vec<_>>(), ["mlx5_0", "mlx5_1"]);
        assert!(found.iter().all(|device| device.state.is_err()));
        assert_eq!(hardware(&class), []);
    }
}
