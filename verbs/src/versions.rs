//! The versions of a layout or a protocol that two processes share.

use std::fmt;

/// The versions that this process speaks: its own and, unless its definition says why not, the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The oldest version.
    pub oldest: u32,
    /// The newest version, this process's own.
    pub newest: u32,
}

impl Versions {
    /// Makes the versions of a layout whose older versions this process does not speak.
    pub const fn only(version: u32) -> Self {
        Self { oldest: version, newest: version }
    }

    /// Returns whether this process speaks `version`.
    pub const fn speaks(self, version: u32) -> bool {
        self.oldest <= version && version <= self.newest
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { oldest, newest } = self;
        if oldest == newest { write!(f, "{newest}") } else { write!(f, "{oldest} to {newest}") }
    }
}
