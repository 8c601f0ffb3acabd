//! The policy that decides which processes a device lets in (`RDMA_SOFT_PEERS`).

use std::ffi::OsStr;

use super::level::Identity;
use crate::VerbsError;

/// The variable that names the policy.
const VARIABLE: &str = "RDMA_SOFT_PEERS";

/// The processes that a device lets in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Policy {
    /// Processes of this user.
    #[default]
    User,
    /// Processes of this user, which may read the memory of this process even if the kernel does not let them trace it.
    TrustedUser,
    /// Every process that can open the device's socket.
    Any,
}

impl Policy {
    /// The values of the variable.
    pub(crate) const VALUES: [(&'static str, Self); 3] =
        [("user", Self::User), ("trusted-user", Self::TrustedUser), ("any", Self::Any)];

    /// Reads the policy from the value of `RDMA_SOFT_PEERS`.
    pub(crate) fn new(value: Option<&OsStr>) -> Result<Self, VerbsError> {
        let Some(value) = value else { return Ok(Self::default()) };
        let known = Self::VALUES.into_iter().find(|(name, _)| value.eq_ignore_ascii_case(name));
        known.map(|(_, policy)| policy).ok_or_else(|| {
            VerbsError::Unusable(format!("{VARIABLE}={value:?}: takes one of user, trusted-user, any"))
        })
    }

    /// Returns whether processes of this user may read the memory of this process, whether or not they could trace it.
    pub(crate) fn trusts_user(self) -> bool {
        self == Self::TrustedUser
    }

    /// Returns the mode of the device's socket, if it is a file.
    pub(crate) fn file_mode(self) -> u32 {
        match self {
            Self::User | Self::TrustedUser => 0o600,
            // The permissions of the directory decide.
            Self::Any => 0o666,
        }
    }

    /// Fails if the device does not let in the process `peer`.
    pub(crate) fn admit(self, peer: &Identity) -> Result<(), VerbsError> {
        if self == Self::Any || peer.same_user {
            return Ok(());
        }
        let (theirs, ours) = (peer.user, rustix::process::geteuid().as_raw());
        let advice = "they share no memory unless both ends set RDMA_SOFT_PEERS=any";
        Err(VerbsError::Unreachable(if theirs == ours {
            format!(
                "the peer's process belongs to a user that this user namespace does not know, as which it shows user {theirs}: {advice}"
            )
        } else {
            format!("the peer's process belongs to user {theirs}, this one to user {ours}: {advice}")
        }))
    }
}
