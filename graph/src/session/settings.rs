//! The settings of a part's connections, with whom it connects, and what all parts must have in common.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use xxhash_rust::xxh3::Xxh3;

use crate::dataflow::{Node, Topology};
use crate::error::GraphError;
use crate::placement::{Crossing, Part, Placements};
use crate::session::Listener;
use crate::transfer::TransferMode;
use tonic_rdma::{CallConfig, Config, Policy};

/// HTTP/2 windows and frames in bytes, of client and server. The command `tonic-rdma compare` found them best
/// for tensors of 64 KiB to 64 MiB over TCP; larger windows carried no more (`cli/src/measure/settings.rs`).
pub(super) const STREAM_WINDOW: u32 = 16 << 20;
pub(super) const CONNECTION_WINDOW: u32 = 32 << 20;
pub(super) const MAX_FRAME: u32 = 512 << 10;

/// The most calls in flight on one connection. HTTP/2 delays further calls, so this must be enough for all
/// tensors that may be in flight to one part: the crossing tensors times the window.
pub(super) const MAX_CALLS: u32 = 1 << 16;
/// The calls of a connection that bring no tensor: to join and to watch, of which a part makes one each. The
/// rest is room for repeated ones.
pub(super) const OTHER_CALLS: u32 = 16;

/// What a message has beside the content of its tensor, at most.
pub(super) const MESSAGE_MARGIN: u64 = 4096;

/// The settings of a part's connections. [`Listener::builder`] makes them.
#[derive(Clone, Debug)]
pub struct ListenerBuilder {
    /// `None` means the values of the `RDMA_*` variables.
    config: Option<Config>,
    pub(super) threads: usize,
    pub(super) largest_tensor: u64,
    pub(super) copies: u64,
}

impl Default for ListenerBuilder {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        Self { config: None, threads: cores.clamp(2, 8), largest_tensor: 2 << 30, copies: 2 << 30 }
    }
}

impl ListenerBuilder {
    /// Sets the RDMA device and its settings. The policy in it has no effect. The default is
    /// [`Config::from_env`].
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// Sets the number of threads that carry calls. The default is the number of cores, from 2 to 8.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Sets the largest crossing tensor, in bytes, that this part accepts if its shape is not known before,
    /// and in the modes with calls. The default is 2 GiB.
    pub fn largest_tensor(mut self, bytes: u64) -> Self {
        self.largest_tensor = bytes;
        self
    }

    /// Sets the most registered memory, in bytes, for copies of dynamic tensors in mode `rdma-cp`. The
    /// default is 2 GiB.
    pub fn copies(mut self, bytes: u64) -> Self {
        self.copies = bytes;
        self
    }

    /// Listens as [`Listener::bind`] does.
    ///
    /// ```
    /// use tonic_rdma::Config;
    /// use tonic_rdma_graph::session::Listener;
    ///
    /// let listener = Listener::builder().config(Config::default()).threads(2).bind("127.0.0.1:0")?;
    /// assert_ne!(listener.address().port(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The address can't be listened on, a variable or a setting has a bad value, or the system gives no
    /// threads.
    pub fn bind(self, address: &str) -> Result<Listener, GraphError> {
        let from_env =
            || Config::from_env().map_err(|error| GraphError::of_setting("RDMA_*", error.to_string()));
        let config = self.config.clone().map_or_else(from_env, Ok)?;
        Listener::listen(address, self.config(config))
    }

    /// Returns the RDMA settings with this policy.
    pub(super) fn with_policy(&self, policy: Policy) -> Config {
        self.config.clone().unwrap_or_default().policy(policy)
    }
}

/// Returns the limits of native calls: room for two of the largest messages, and for the headers of all calls,
/// which have a quarter.
pub(super) fn calls(settings: &ListenerBuilder) -> CallConfig {
    let headers = 4 * u64::from(MAX_CALLS) * 2048;
    let budget = settings.largest_tensor.saturating_mul(2).clamp(headers, 1 << 50);
    CallConfig::default().connection_limit(budget)
}

/// With whom a part connects, and for what.
#[derive(Clone, Debug)]
pub struct Peering {
    pub(super) part: Part,
    /// The address of each part, in the order of the parts. That of this part is not used.
    pub(super) peers: Vec<String>,
    pub(super) placements: Arc<Placements>,
    fingerprint: Fingerprint,
    pub(super) modes: Vec<TransferMode>,
    pub(super) window: usize,
    pub(super) timeout: Duration,
}

impl Peering {
    /// Makes a peering of the part of this process with the default settings. `peers` has the address of each
    /// part, `host:port`, in the order of the parts. That of this part is not used.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use tonic_rdma_graph::dataflow::Topology;
    /// use tonic_rdma_graph::placement::{Part, Placements};
    /// use tonic_rdma_graph::session::Peering;
    /// use tonic_rdma_graph::transfer::TransferMode;
    ///
    /// fn peering(graph: &Topology, placements: &Arc<Placements>) -> Peering {
    ///     let peers = vec!["10.0.0.1:7000".to_owned(), "10.0.0.2:7000".to_owned()];
    ///     let modes = [TransferMode::GrpcTcp, TransferMode::RdmaZerocp];
    ///     Peering::new(Part(0), peers, graph, placements).modes(modes).window(4)
    /// }
    /// ```
    pub fn new(part: Part, peers: Vec<String>, graph: &Topology, placements: &Arc<Placements>) -> Self {
        Self {
            part,
            peers,
            placements: Arc::clone(placements),
            fingerprint: Fingerprint::new(graph, placements),
            modes: vec![TransferMode::GrpcTcp],
            window: 1,
            timeout: Duration::from_secs(30),
        }
    }

    /// Sets what all parts must have in common. The default is the fingerprint of the graph and its
    /// placements.
    pub fn fingerprint(mut self, fingerprint: Fingerprint) -> Self {
        self.fingerprint = fingerprint;
        self
    }

    /// Sets the modes in which tensors are to cross. The default is all modes that need no RDMA device:
    /// `grpc-tcp`.
    pub fn modes(mut self, modes: impl IntoIterator<Item = TransferMode>) -> Self {
        self.modes = modes.into_iter().collect();
        self
    }

    /// Sets the number of buffers of each crossing tensor: the steps in flight. The default is 1.
    pub fn window(mut self, steps: usize) -> Self {
        self.window = steps;
        self
    }

    /// Sets the longest time until all parts are connected. The default is 30 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Returns what all parts must have in common: names and values.
    pub(super) fn common(&self) -> HashMap<String, String> {
        let modes: Vec<String> = self.modes.iter().map(TransferMode::to_string).collect();
        let numbers = [
            ("the number of parts", self.peers.len().to_string()),
            ("the modes", modes.join(" ")),
            ("the window", self.window.to_string()),
        ];
        self.fingerprint.entries().chain(numbers.map(|(name, value)| (name.to_owned(), value))).collect()
    }

    /// Returns the address of a part.
    pub(super) fn address(&self, part: Part) -> &str {
        self.peers.get(part.0).map_or("", String::as_str)
    }

    /// Checks the numbers.
    pub(super) fn check(&self) -> Result<(), GraphError> {
        let (part, parts) = (self.part, self.placements.partition().count());
        if self.peers.len() != parts {
            let reason =
                format!("{} addresses for {parts} parts; there must be one for each", self.peers.len());
            return Err(GraphError::of_setting("peers", reason));
        }
        if part.0 >= parts {
            return Err(GraphError::of_setting("part", format!("{part} of {parts}: the first part is 0")));
        }
        if !(1..=MOST_BUFFERS).contains(&self.window) {
            return Err(GraphError::of_setting(
                "window",
                format!("{}; it takes 1 to {MOST_BUFFERS}", self.window),
            ));
        }
        if self.modes.is_empty() {
            return Err(GraphError::of_setting("modes", "none is given".to_owned()));
        }
        Ok(())
    }
}

/// The most buffers of a slot.
const MOST_BUFFERS: usize = 1024;

/// Hashes of what all parts of a split graph must have in common, each with its name. Parts compare them when
/// they connect.
///
/// ```
/// use tonic_rdma_graph::dataflow::Topology;
/// use tonic_rdma_graph::placement::Placements;
/// use tonic_rdma_graph::session::Fingerprint;
///
/// fn fingerprint(graph: &Topology, placements: &Placements, seed: u64) -> Fingerprint {
///     // Beside the graph and its partition, all parts need the same seed.
///     Fingerprint::new(graph, placements).with("the seed", &seed.to_le_bytes())
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    entries: Vec<(String, u64)>,
}

impl Fingerprint {
    /// Computes the fingerprint of a split graph: of its nodes and edges, of the parts, and of the crossing
    /// tensors and their placement. The order of the nodes counts, because parts call nodes and crossing
    /// tensors by their numbers.
    ///
    /// ```
    /// # use tonic_rdma_graph::dataflow::Topology;
    /// # use tonic_rdma_graph::placement::{Partition, Placements};
    /// # use tonic_rdma_graph::session::Fingerprint;
    /// # let graph = Topology::new();
    /// let placements = Placements::new(&graph, &Partition::new(&graph, 2, vec![])?)?;
    /// let same = Placements::new(&graph, &Partition::new(&graph, 2, vec![])?)?;
    /// assert_eq!(Fingerprint::new(&graph, &placements), Fingerprint::new(&graph, &same));
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    pub fn new(graph: &Topology, placements: &Placements) -> Self {
        let mut parts = Xxh3::new();
        let numbers = placements.partition().parts();
        numbers.iter().for_each(|part| parts.update(&(part.0 as u64).to_le_bytes()));
        let entries = vec![
            ("the graph".to_owned(), hash_of_graph(graph)),
            ("the partition".to_owned(), parts.digest()),
            ("the placement of crossing tensors".to_owned(), hash_of_crossings(placements.crossings())),
        ];
        Self { entries }
    }

    /// Adds something else that all parts must have in common. `name` goes into the error message if it
    /// differs.
    pub fn with(mut self, name: &str, content: &[u8]) -> Self {
        self.entries.push((name.to_owned(), xxhash_rust::xxh3::xxh3_64(content)));
        self
    }

    /// Returns the names and hashes, as parts compare them.
    pub(super) fn entries(&self) -> impl Iterator<Item = (String, String)> {
        self.entries.iter().map(|(name, hash)| (name.clone(), format!("{hash:016x}")))
    }
}

fn hash_of_graph(graph: &Topology) -> u64 {
    let mut hash = Xxh3::new();
    let mut text = String::new();
    for (_, node) in graph.nodes() {
        text.clear();
        let Node { name, kind, role, inputs, outputs, work: _, stays } = node;
        // Writing into a `String` never fails.
        let _ = write!(text, "{name:?} {kind:?} {role:?} {inputs:?} {stays}");
        outputs.iter().for_each(|fact| _ = write!(text, " {fact}"));
        text.push('\n');
        hash.update(text.as_bytes());
    }
    hash.update(format!("{:?}", graph.results()).as_bytes());
    hash.digest()
}

fn hash_of_crossings(crossings: &[Crossing]) -> u64 {
    let mut hash = Xxh3::new();
    for Crossing { id, name, outlet, from, to, consumers, placement } in crossings {
        let text = format!("{id:?} {name:?} {outlet:?} {from:?} {to:?} {consumers:?} {placement:?}\n");
        hash.update(text.as_bytes());
    }
    hash.digest()
}

#[cfg(test)]
mod fingerprint_tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use tonic_rdma_tensor::Dtype;

    use super::*;
    use crate::dataflow::{Fact, NodeId, Outlet, Role};
    use crate::placement::{Part, Partition, Placements};

    /// A chain of three nodes, whose last output has this many elements.
    fn chain(last: u64) -> Topology {
        let mut graph = Topology::new();
        for (name, length) in [("input", 4), ("one", 4), ("two", last)] {
            let inputs = graph.len().checked_sub(1).map(|node| Outlet { node: NodeId(node), output: 0 });
            let role = if inputs.is_none() { Role::Input } else { Role::Compute };
            let (name, kind, outputs) =
                (name.to_owned(), "Test".to_owned(), vec![Fact::known(Dtype::F32, &[length])]);
            let inputs = inputs.into_iter().collect();
            graph.add(Node { name, kind, role, inputs, outputs, work: 1, stays: false }).unwrap();
        }
        graph.result(Outlet { node: NodeId(2), output: 0 }).unwrap();
        graph
    }

    fn split(graph: &Topology, parts: [usize; 3]) -> Fingerprint {
        let partition = Partition::new(graph, 2, parts.map(Part).to_vec()).unwrap();
        Fingerprint::new(graph, &Placements::new(graph, &partition).unwrap())
    }

    #[test]
    fn each_difference_of_two_split_graphs_is_named() {
        let graph = chain(4);
        let ours = split(&graph, [0, 0, 1]);
        let difference = |other: Fingerprint| {
            let both = ours.entries().zip(other.entries());
            both.filter(|(ours, theirs)| ours != theirs).map(|(ours, _)| ours.0).collect::<Vec<_>>()
        };
        assert_eq!(difference(split(&chain(4), [0, 0, 1])), [""; 0]);
        assert_eq!(
            difference(split(&graph, [0, 1, 1])),
            ["the partition", "the placement of crossing tensors"]
        );
        assert_eq!(difference(split(&chain(9), [0, 0, 1])), ["the graph"], "another shape");
        let mut other = chain(4);
        other.result(Outlet { node: NodeId(1), output: 0 }).unwrap();
        assert_eq!(difference(split(&other, [0, 0, 1])), ["the graph"], "another result");
    }
}
