//! The session of a part that is connected.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tonic_rdma::memory::Pool;
use tonic_rdma_tensor::{Channel, RdmaDevice};

use crate::dataflow::Value;
use crate::error::GraphError;
use crate::placement::Part;
use crate::schedule::Transfers;
use crate::session::settings::setting;
use crate::session::state::State;
use crate::session::threads::Threads;
use crate::transfer::{Base, CallEnds, CallTransfers, Mode, RunsOfParts, SlotEnds, SlotTransfers};
use tonic_rdma_verbs::internal::lock;

/// A part that is connected to all other parts. [`Listener::connect`](super::Listener::connect) makes it. It ends when it and all its transfers are dropped; the
/// other parts then learn that this part has left.
///
/// ```
/// use std::sync::Arc;
///
/// use tonic_rdma_graph::dataflow::{Topology, Value};
/// use tonic_rdma_graph::placement::{Part, Placements};
/// use tonic_rdma_graph::schedule::Transfers;
/// use tonic_rdma_graph::session::{Listener, Peering, Session, Settings};
/// use tonic_rdma_graph::transfer::Mode;
/// use tonic_rdma_graph::GraphError;
///
/// /// Connects part 1 to part 0. Returns what its executor needs.
/// fn part_1<V: Value>(
///     graph: &Topology,
///     placements: &Arc<Placements>,
///     part_0: String,
/// ) -> Result<(Session, Box<dyn Transfers<V>>), GraphError> {
///     let listener = Listener::bind("0.0.0.0:7000", Settings::from_env()?)?;
///     let own = listener.address().to_string();
///     let mut peering = Peering::new(Part(1), vec![part_0, own], graph, placements);
///     peering.modes = vec![Mode::RdmaZerocp];
///     let session = listener.connect(peering)?;
///     let addresses = session.addresses_distributed();
///     println!("{} addresses of slots are known, {} were given", addresses.learned, addresses.given);
///     let transfers = session.transfers(Mode::RdmaZerocp)?;
///     Ok((session, transfers))
/// }
/// ```
pub struct Session {
    pub(super) core: Arc<Core>,
    pub(super) modes: Vec<Mode>,
    pub(super) ends: Mutex<HashMap<Mode, Ends>>,
    pub(super) addresses: Addresses,
    /// The most registered memory for copies.
    pub(super) copies: u64,
}

/// The addresses of static slots that were distributed before the first step, in all modes with slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// The addresses at other parts that this part has, to send there.
    pub learned: usize,
    /// The addresses of this part that the other parts have.
    pub given: usize,
}

/// What the transfers of one mode need.
#[derive(Debug)]
pub(super) enum Ends {
    Calls(CallEnds),
    Slots(SlotEnds),
}

/// What lives as long as the session or one of its transfers.
pub(super) struct Core {
    pub(super) state: Arc<State>,
    /// Links to the other parts, for as long as the session lives.
    pub(super) channels: Vec<Channel>,
    pub(super) device: RdmaDevice,
    /// Dropped last.
    pub(super) threads: Threads,
}

impl Session {
    /// Returns the part of this process.
    pub fn part(&self) -> Part {
        self.core.state.me
    }

    /// Returns the modes.
    pub fn modes(&self) -> &[Mode] {
        &self.modes
    }

    /// Returns how many addresses of static slots were distributed when the parts connected.
    pub fn addresses_distributed(&self) -> Addresses {
        self.addresses
    }

    /// Returns provider and name of the RDMA device of the slots, such as `soft` and `soft0`, if this part sends through slots.
    pub fn device(&self) -> Option<(&'static str, &str)> {
        self.core.channels.first().map(Channel::device)
    }

    /// Returns the transfers of a mode, for one executor. The transfers of several modes may be used in turn, and each of them counts
    /// for itself.
    ///
    /// # Errors
    /// The session was made without this mode, or its transfers were taken already.
    pub fn transfers<V: Value>(&self, mode: Mode) -> Result<Box<dyn Transfers<V>>, GraphError> {
        if !self.modes.contains(&mode) {
            let names: Vec<String> = self.modes.iter().map(Mode::to_string).collect();
            return Err(setting(
                "mode",
                format!("{mode}: this session was made for {}", names.join(" and ")),
            ));
        }
        let ends = lock(&self.ends).remove(&mode);
        let taken = || setting("mode", format!("{mode}: its transfers were taken already"));
        let base = self.base();
        Ok(match ends.ok_or_else(taken)? {
            Ends::Calls(ends) => Box::new(CallTransfers::new(base, ends)),
            Ends::Slots(ends) => {
                let copies = (mode == Mode::RdmaCp).then(|| Pool::for_sending(self.copies));
                Box::new(SlotTransfers::new(base, self.core.device.clone(), mode, copies, ends))
            }
        })
    }

    /// Returns an error if another part has failed or is lost.
    ///
    /// # Errors
    /// [`PeerLost`](GraphError::PeerLost), [`PeerFailed`](GraphError::PeerFailed).
    pub fn check(&self) -> Result<(), GraphError> {
        self.core.state.peers.check_all()
    }

    /// Tells the other parts that this part has failed, and why. Does not wait.
    pub fn abort(&self, reason: &str) {
        self.core.state.meeting.fail(reason);
    }

    /// Leaves the session, and waits until all other parts know, at most for `limit`. A process that ends at once calls this, so that the
    /// other parts don't take its end for a crash. Transfers that live on find no threads.
    pub fn leave(self, limit: Duration) {
        self.core.threads.leave_within(limit);
    }

    fn base(&self) -> Base {
        let Core { state, threads, .. } = &*self.core;
        Base {
            peers: Arc::clone(&state.peers),
            runtime: threads.handle().clone(),
            runs: Arc::clone(state) as Arc<dyn RunsOfParts>,
            _session: Arc::clone(&self.core) as Arc<dyn Send + Sync>,
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("part", &self.part())
            .field("modes", &self.modes)
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}
