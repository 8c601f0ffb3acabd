//! What a rank knows of its group, shared by the service, the watch and the communicator.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tonic_rdma_tensor::ChannelError;
use tonic_rdma_tensor::internal::meeting::{Hall, Key, shortened};

use crate::error::CollectiveError;
use crate::group::REPORTS;
use crate::group::agreement::{Move, Proposal, Standing};
use crate::group::failure::Failure;
use crate::group::position::Position;
use crate::group::proto::{Report, Reports};
use tonic_rdma::internal::lock;

/// The name of a group: the key of its meeting, which all ranks share.
pub(crate) type GroupId = Key;

/// The state. Ranks are those of the meeting.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) me: usize,
    pub(crate) size: usize,
    /// The meeting, once this rank has come to it.
    pub(crate) hall: Hall<Reports>,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    standing: Standing,
    epoch: Option<Arc<Epoch>>,
    lost: BTreeMap<usize, ChannelError>,
    /// The reason why this rank has left the group.
    left: Option<Arc<str>>,
}

/// One generation of the group.
#[derive(Debug)]
pub(crate) struct Epoch {
    pub(crate) generation: u64,
    /// The members, by their ranks of the meeting. The index is the rank in this generation.
    pub(crate) members: Vec<usize>,
    /// This rank's index.
    pub(crate) rank: usize,
    pub(crate) failure: Failure,
    pub(crate) position: Position,
}

impl Epoch {
    fn new(generation: u64, members: Vec<usize>, me: usize) -> Self {
        let rank = members.iter().position(|rank| *rank == me).unwrap_or_default();
        Self { generation, members, rank, failure: Failure::default(), position: Position::default() }
    }

    /// Returns the rank in this generation of a rank of the meeting.
    pub(crate) fn index(&self, rank: usize) -> Option<usize> {
        self.members.binary_search(&rank).ok()
    }

    fn lose(&self, rank: usize, reason: &ChannelError) {
        if let Some(rank) = self.index(rank) {
            let place = self.position.place();
            self.failure.set(CollectiveError::RankLost { rank, place, reason: reason.clone() });
        }
    }
}

impl State {
    pub(crate) fn new(me: usize, size: usize) -> Self {
        Self { me, size, hall: Hall::default(), inner: Mutex::default() }
    }

    /// Returns the name of the group, if it has one yet.
    pub(crate) fn group(&self) -> Option<GroupId> {
        self.hall.get()?.key(self.me)
    }

    /// Begins the first generation: all ranks of the meeting.
    pub(crate) fn begin(&self) -> Arc<Epoch> {
        lock(&self.inner).adopt(1, (0..self.size).collect(), self.me)
    }

    /// Notes that a rank is lost.
    pub(crate) fn lose(&self, rank: usize, reason: ChannelError) {
        let mut inner = lock(&self.inner);
        inner.standing.suspect(rank, reason.to_string());
        if let Some(epoch) = &inner.epoch {
            epoch.lose(rank, &reason);
        }
        inner.lost.entry(rank).or_insert(reason);
    }

    /// Suspects a rank during an agreement.
    pub(crate) fn suspect(&self, rank: usize, reason: &str) {
        lock(&self.inner).standing.suspect(rank, reason);
    }

    /// Leaves the group for ever, because the others go on without this rank.
    pub(crate) fn leave(&self, reason: &Arc<str>) {
        lock(&self.inner).left.get_or_insert_with(|| Arc::clone(reason));
    }

    /// Returns the reason why this rank has left.
    pub(crate) fn left(&self) -> Option<Arc<str>> {
        lock(&self.inner).left.clone()
    }

    /// Takes what another rank reports now. A member that reports a failure of a later generation has left this one behind, and its report
    /// of this one may be gone.
    pub(crate) fn hear(&self, rank: usize) {
        let Some(epoch) = lock(&self.inner).epoch.clone() else { return };
        let first_of = |reports: &[Report]| {
            let latest = &reports[reports.len().saturating_sub(REPORTS)..];
            let report = latest.iter().find(|report| report.generation >= epoch.generation)?;
            Some(shortened(&report.message))
        };
        let message =
            self.hall.get().and_then(|meeting| meeting.of(rank, |other| first_of(&other.details.reports)));
        if let (Some(message), Some(rank)) = (message.flatten(), epoch.index(rank)) {
            epoch.failure.set(CollectiveError::Reported { rank, message: message.into() });
        }
    }

    /// Returns what this rank knows, and where it is.
    pub(crate) fn standing(&self) -> (Standing, Option<Arc<Epoch>>) {
        let inner = lock(&self.inner);
        (inner.standing.clone(), inner.epoch.clone())
    }

    /// Says whether this rank waits for an agreement. If it is past `generation` already, returns the later group.
    pub(crate) fn agree(&self, generation: u64, agreeing: bool) -> Option<Arc<Epoch>> {
        let mut inner = lock(&self.inner);
        if inner.standing.generation > generation {
            return inner.epoch.clone();
        }
        inner.standing.agreeing = agreeing;
        None
    }

    /// Returns what this rank does next in an agreement.
    pub(crate) fn next(&self, answers: &BTreeMap<usize, Standing>) -> Move {
        lock(&self.inner).standing.next(self.me, answers)
    }

    /// Promises this rank's part in a group.
    ///
    /// # Errors
    /// The reason why not.
    pub(crate) fn promise(&self, proposal: &Proposal) -> Result<(), String> {
        if proposal.members.iter().any(|rank| *rank >= self.size) {
            let (members, size) = (&proposal.members, self.size);
            return Err(format!("{members:?} names a rank that is not one of {size}"));
        }
        lock(&self.inner).standing.promise(self.me, proposal)
    }

    /// Begins to be in a group that was agreed upon. A coordinator gives its `promised` generation, and gets `None` if it has
    /// promised a later one since.
    pub(crate) fn adopt(&self, generation: u64, members: Vec<usize>) -> Option<Arc<Epoch>> {
        let epoch = {
            let mut inner = lock(&self.inner);
            if generation <= inner.standing.generation || generation < inner.standing.promised {
                return None;
            }
            inner.adopt(generation, members, self.me)
        };
        // A member may have been in it before, and have reported its failure.
        (0..self.size).for_each(|rank| self.hear(rank));
        Some(epoch)
    }
}

impl Inner {
    fn adopt(&mut self, generation: u64, members: Vec<usize>, me: usize) -> Arc<Epoch> {
        let epoch = Arc::new(Epoch::new(generation, members.clone(), me));
        self.standing.adopt(generation, members);
        for (rank, reason) in &self.lost {
            epoch.lose(*rank, reason);
        }
        self.epoch = Some(Arc::clone(&epoch));
        epoch
    }
}
