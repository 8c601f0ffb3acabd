//! With whom a part connects.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::dataflow::Topology;
use crate::error::GraphError;
use crate::placement::{Part, Placements};
use crate::session::fingerprint::Fingerprint;
use crate::session::settings::setting;
use crate::transfer::Mode;

/// With whom a part connects, and for what.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Peering {
    /// The part of this process.
    pub part: Part,
    /// The address of each part: `host:port`, in the order of the parts. That of this part is not used.
    pub peers: Vec<String>,
    /// How the graph is split.
    pub placements: Arc<Placements>,
    /// What all parts must have in common.
    pub fingerprint: Fingerprint,
    /// The modes in which tensors are to cross. The default is all modes that need no RDMA device: `grpc-tcp`.
    pub modes: Vec<Mode>,
    /// The number of buffers of each crossing tensor: the steps in flight. The default is 1.
    pub window: usize,
    /// The longest time until all parts are connected. The default is 30 s.
    pub timeout: Duration,
}

impl Peering {
    /// Makes a peering with the default settings.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use tonic_rdma_graph::dataflow::Topology;
    /// use tonic_rdma_graph::placement::{Part, Placements};
    /// use tonic_rdma_graph::session::Peering;
    /// use tonic_rdma_graph::transfer::Mode;
    ///
    /// fn peering(graph: &Topology, placements: &Arc<Placements>) -> Peering {
    ///     let peers = vec!["10.0.0.1:7000".to_owned(), "10.0.0.2:7000".to_owned()];
    ///     let mut peering = Peering::new(Part(0), peers, graph, placements);
    ///     peering.modes = vec![Mode::GrpcTcp, Mode::RdmaZerocp];
    ///     peering.window = 4;
    ///     peering
    /// }
    /// ```
    pub fn new(part: Part, peers: Vec<String>, graph: &Topology, placements: &Arc<Placements>) -> Self {
        Self {
            part,
            peers,
            placements: Arc::clone(placements),
            fingerprint: Fingerprint::of(graph, placements),
            modes: vec![Mode::GrpcTcp],
            window: 1,
            timeout: Duration::from_secs(30),
        }
    }

    /// Returns what all parts must have in common: names and values.
    pub(super) fn common(&self) -> HashMap<String, String> {
        let modes: Vec<String> = self.modes.iter().map(Mode::to_string).collect();
        let numbers = [
            ("the number of parts", self.peers.len().to_string()),
            ("the modes", modes.join(" ")),
            ("the window", self.window.to_string()),
        ];
        self.fingerprint.entries().chain(numbers.map(|(name, value)| (name.to_owned(), value))).collect()
    }

    /// Checks the numbers.
    pub(super) fn check(&self) -> Result<(), GraphError> {
        let (part, parts) = (self.part, self.placements.partition().count());
        if self.peers.len() != parts {
            let reason =
                format!("{} addresses for {parts} parts; there must be one for each", self.peers.len());
            return Err(setting("peers", reason));
        }
        if part.0 >= parts {
            return Err(setting("part", format!("{part} of {parts}: the first part is 0")));
        }
        if !(1..=MOST_BUFFERS).contains(&self.window) {
            return Err(setting("window", format!("{}; it takes 1 to {MOST_BUFFERS}", self.window)));
        }
        if self.modes.is_empty() {
            return Err(setting("modes", "none is given".to_owned()));
        }
        Ok(())
    }
}

/// The most buffers of a slot.
const MOST_BUFFERS: usize = 1024;
