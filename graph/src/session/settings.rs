//! The settings of a part's connections.

use tonic_rdma::{CallConfig, Config};

use crate::error::GraphError;

/// HTTP/2 windows and frames in bytes, of both ends. The command `tonic-rdma compare` found them best for tensors of 64 KiB to 64 MiB over
/// TCP; larger windows carried no more (`cli/src/measure/transport/http2.rs`).
pub(super) const STREAM_WINDOW: u32 = 16 << 20;
pub(super) const CONNECTION_WINDOW: u32 = 32 << 20;
pub(super) const MAX_FRAME: u32 = 512 << 10;

/// The most calls under way in one connection. HTTP/2 makes a caller wait that has more, so all tensors that may be under way to one part
/// have to fit: the crossing tensors times the window.
pub(super) const MAX_CALLS: u32 = 1 << 16;
/// The calls of a connection that bring no tensor: to join and to watch, of which a part makes one each. The rest is room for repeated ones.
pub(super) const OTHER_CALLS: u32 = 16;

/// What a message has beside the content of its tensor, at most.
pub(super) const MESSAGE_MARGIN: u64 = 4096;

/// The settings of a part's connections.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// The RDMA device and its settings. The policy in it has no effect. The default is [`Config::default`].
    pub config: Config,
    /// The number of threads that carry calls. The default is the number of cores, from 2 to 8.
    pub threads: usize,
    /// The largest crossing tensor, in bytes, that this part accepts if its shape is not known before, and in the modes with calls. The
    /// default is 2 GiB.
    pub largest_tensor: u64,
    /// The most registered memory, in bytes, for copies of dynamic tensors in mode `rdma-cp`. The default is 2 GiB.
    pub copies: u64,
}

impl Default for Settings {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        Self {
            config: Config::default(),
            threads: cores.clamp(2, 8),
            largest_tensor: 2 << 30,
            copies: 2 << 30,
        }
    }
}

impl Settings {
    /// Returns the defaults, with the RDMA settings of the `RDMA_*` variables.
    ///
    /// ```
    /// use tonic_rdma_graph::session::Settings;
    ///
    /// let settings = Settings::from_env()?;
    /// assert!(settings.threads >= 2);
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    ///
    /// # Errors
    /// A variable has a bad value.
    pub fn from_env() -> Result<Self, GraphError> {
        let config = Config::from_env().map_err(|error| setting("RDMA_*", error.to_string()))?;
        Ok(Self { config, ..Self::default() })
    }
}

/// Returns the limits of native calls: room for two of the largest messages.
pub(super) fn calls(settings: &Settings) -> CallConfig {
    let budget = settings.largest_tensor.saturating_mul(2).clamp(256 << 20, 1 << 50);
    CallConfig::default().landing_budget(budget)
}

/// Makes the error of a setting.
pub(super) fn setting(setting: &'static str, reason: String) -> GraphError {
    GraphError::Setting { setting, reason }
}
