//! How far the software device of this process reaches, by the settings in the environment: where it finds
//! peers, and which peers it lets in.

use std::env;
use std::path::Path;

use super::peers::level::{Policy, YAMA, check_traceable};
use super::peers::sockets::Sockets;
use crate::VerbsError;

/// The settings of the device.
#[derive(Clone, Debug)]
pub(super) struct Reach {
    pub(super) sockets: Sockets,
    pub(super) policy: Policy,
}

impl Reach {
    /// Reads the variables of the device. Fails if one has a value that can't be used.
    pub(super) fn from_environment() -> Result<Self, VerbsError> {
        let sockets = Sockets::new(env::var_os("RDMA_SOFT_DIR").as_deref())?;
        let policy = Policy::new(env::var_os("RDMA_SOFT_PEERS").as_deref())?;
        Ok(Self { sockets, policy })
    }
}

/// Returns whether the software device finds its peers through a directory, and not in its network namespace.
pub fn soft_uses_directory() -> bool {
    env::var_os("RDMA_SOFT_DIR").is_some()
}

/// Returns whether the software device lets in processes of other users.
pub fn soft_admits_any_user() -> bool {
    Policy::new(env::var_os("RDMA_SOFT_PEERS").as_deref()).is_ok_and(|policy| policy == Policy::Any)
}

/// Fails with the reason if processes of this user, which the software device lets in, may not read the
/// memory of this process.
///
/// # Errors
/// The reason, in words.
pub fn soft_shares_with_user() -> Result<(), String> {
    match Policy::new(env::var_os("RDMA_SOFT_PEERS").as_deref()) {
        Ok(policy) if policy.trusts_user() => Ok(()),
        _ => check_traceable(Path::new(YAMA)),
    }
}

/// Returns whether `RDMA_SOFT_DIR` takes `value`. The directory may still be unusable.
pub fn soft_takes_directory(value: &str) -> bool {
    Path::new(value).is_absolute()
}

/// Describes where the software device finds its peers. Both sides of a connection must find them in the same
/// way.
///
/// # Errors
/// A variable has a value that can't be used.
pub fn soft_location() -> Result<String, VerbsError> {
    Ok(Reach::from_environment()?.sockets.to_string())
}
