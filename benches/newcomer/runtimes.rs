//! The runtimes of typical programs.

use std::fmt;
use std::future::Future;

/// The kind of a program's runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Flavour {
    /// `#[tokio::main]`.
    MultiThread,
    /// `#[tokio::main(flavor = "current_thread")]`.
    CurrentThread,
    /// A current-thread runtime built with `tonic_rdma::runtime::idle_polling`.
    IdlePolling,
}

impl Flavour {
    pub(crate) const ALL: [Self; 3] = [Self::MultiThread, Self::CurrentThread, Self::IdlePolling];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::MultiThread => "multi-thread",
            Self::CurrentThread => "current-thread",
            Self::IdlePolling => "idle-polling",
        }
    }

    pub(crate) fn from_name(name: &str) -> Self {
        let found = Self::ALL.into_iter().find(|flavour| flavour.name() == name);
        found.unwrap_or_else(|| panic!("no runtime {name:?}: multi-thread, current-thread, idle-polling"))
    }

    /// Runs a future in this runtime.
    pub(crate) fn run<T>(self, main: impl Future<Output = T>) -> T {
        let mut builder = match self {
            Self::MultiThread => tokio::runtime::Builder::new_multi_thread(),
            Self::CurrentThread | Self::IdlePolling => tokio::runtime::Builder::new_current_thread(),
        };
        if self == Self::IdlePolling {
            tonic_rdma::runtime::idle_polling(&mut builder);
        }
        builder.enable_all().build().unwrap().block_on(main)
    }
}

impl fmt::Display for Flavour {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}
