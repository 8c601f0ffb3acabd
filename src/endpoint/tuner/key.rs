//! The key of a calibration.

use tonic_rdma_verbs::DeviceAttributes;

/// The conditions that a calibration holds for. A calibration of another device, driver, processor or version of this crate
/// is not used.
///
/// ```
/// use tonic_rdma::CalibrationKey;
///
/// let key = CalibrationKey::new(&tonic_rdma_verbs::soft::attributes(), 64 << 10);
/// assert_eq!(key.provider, "soft");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CalibrationKey {
    /// Provider that drives the device.
    pub provider: String,
    /// Name of the device.
    pub device: String,
    /// The device's kind and firmware, and the version of the kernel; empty on the software device.
    pub driver: String,
    /// Version and kind of build of this crate.
    pub version: String,
    /// Model of the processor.
    pub cpu: String,
    /// Length of a receive buffer in bytes, which limits the length of an eager message.
    pub slot_size: u32,
}

impl CalibrationKey {
    /// Makes the key for the device with these attributes in this process, with receive buffers of `slot_size` bytes.
    ///
    /// ```
    /// use tonic_rdma::CalibrationKey;
    ///
    /// let device = tonic_rdma_verbs::open("soft0")?;
    /// let key = CalibrationKey::new(device.attributes(), 17_408);
    /// # drop(key);
    /// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
    /// ```
    pub fn new(attributes: &DeviceAttributes, slot_size: u32) -> Self {
        let build = if cfg!(debug_assertions) { "debug" } else { "release" };
        let driver = if attributes.locks_memory { driver(&attributes.name) } else { String::new() };
        Self {
            provider: line(attributes.provider),
            device: line(&attributes.name),
            driver: line(&driver),
            version: format!("{} {build}", env!("CARGO_PKG_VERSION")),
            cpu: line(&processor()),
            slot_size,
        }
    }
}

/// Returns kind and firmware of a device with a driver in the kernel, and the version of the kernel.
fn driver(device: &str) -> String {
    let read =
        |path: String| std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let attribute = |name: &str| read(format!("/sys/class/infiniband/{device}/{name}"));
    [attribute("hca_type"), attribute("fw_ver"), read("/proc/sys/kernel/osrelease".into())].join(" ")
}

/// Returns the model of the processor.
fn processor() -> String {
    let Ok(text) = std::fs::read_to_string("/proc/cpuinfo") else { return String::new() };
    let named = |line: &str| {
        let (name, value) = line.split_once(':')?;
        ["model name", "CPU part"].contains(&name.trim()).then(|| value.trim().to_owned())
    };
    text.lines().find_map(named).unwrap_or_default()
}

/// Returns `text` as one line of a bounded length.
fn line(text: &str) -> String {
    const LONGEST: usize = 120;
    text.chars()
        .filter(|character| !character.is_control())
        .take(LONGEST)
        .collect::<String>()
        .trim()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_the_software_device_differ_by_slot_size() {
        let attributes = tonic_rdma_verbs::soft::attributes();
        let key = CalibrationKey::new(&attributes, 17_408);
        assert_eq!((key.provider.as_str(), key.device.as_str()), ("soft", "soft0"));
        assert!(key.version.starts_with(env!("CARGO_PKG_VERSION")) && key.driver.is_empty());
        assert_ne!(key, CalibrationKey::new(&attributes, 4096));
    }

    #[test]
    fn a_name_stays_on_its_line() {
        assert_eq!(line(" a\nb=c\u{7f} "), "ab=c");
        assert_eq!(line(&"x".repeat(1000)).len(), 120);
    }
}
