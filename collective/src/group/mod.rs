//! The group: which ranks there are, how they meet, how they notice that one is lost, and how the survivors
//! agree.
//!
//! ```text
//!  Launch      rank, size and address, from the environment or from code
//!     │ Group::join
//!  Session     a runtime with one thread; one server for the tensor device, the bootstrap and this module's service; the bootstrap at rank 0;
//!     │        a channel to every other rank, and a task that waits for the end of each channel and receives the rank's reports
//!     ▼
//!  Group ── generation 1: all ranks ── a rank is lost ── survivors() ── generation 2 …
//! ```
//!
//! The bootstrap is that of `tonic-rdma-tensor`, which the parts of a graph use too. This module moves no
//! elements. Nothing here waits on the caller's runtime.

mod agreement;
mod calls;
mod launch;
mod proto;
mod session;
mod state;
mod survivors;

use std::sync::Arc;
use std::time::Duration;

use tonic_rdma_tensor::Channel;
use tonic_rdma_tensor::unstable::bootstrap::{OwnRuntime, shortened};

use crate::error::{CollectiveError, CollectiveErrorKind, setup};
use crate::group::proto::{Loss, Report};
use crate::group::session::Session;
use crate::group::state::{Epoch, REPORTS};

pub use launch::Launch;
pub(crate) use session::Settings;
pub(crate) use state::{Failure, Position};

/// One generation of a group, as one rank sees it. When the last clone of all generations is dropped, the
/// channels and the server of this rank end, and so do the channels of the other ranks to it.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) session: Arc<Session>,
    epoch: Arc<Epoch>,
}

impl Group {
    /// Meets the other ranks, and opens channels to all of them. Works on any runtime, and needs none.
    ///
    /// # Errors
    /// The ranks do not meet in time, or a rank can't be reached by RDMA. The message names address and
    /// ranks.
    pub(crate) async fn join(launch: Launch, settings: Settings) -> Result<Self, CollectiveError> {
        let launch = launch.checked()?;
        let runtime = OwnRuntime::new("rdma-collective", 1)
            .map_err(|error| setup(format!("can't start the thread of a group: {error}")))?;
        let runtime = Arc::new(runtime);
        let connecting = session::connect(launch, settings, Arc::clone(&runtime));
        let (session, epoch) = runtime.run(connecting, setup).await?;
        Ok(Self { session, epoch })
    }

    /// Returns this rank's number, from 0.
    pub(crate) fn rank(&self) -> usize {
        self.epoch.rank
    }

    /// Returns the number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.epoch.members.len()
    }

    /// Returns the generation: 1 at first, and larger after each agreement. It is equal on all ranks of the
    /// group.
    pub(crate) fn generation(&self) -> u64 {
        self.epoch.generation
    }

    /// Returns the channel to a rank; `None` for this rank.
    pub(crate) fn channel(&self, rank: usize) -> Option<&Channel> {
        let original = *self.epoch.members.get(rank)?;
        Some(&self.session.peers.get(original)?.as_ref()?.channel)
    }

    /// Returns the rank that another rank had at first, which names it forever.
    pub(crate) fn original(&self, rank: usize) -> Option<usize> {
        self.epoch.members.get(rank).copied()
    }

    /// Returns the first part of the names of this group's regions. Only ranks of the group know it, so no
    /// other process can attach the regions.
    pub(crate) fn region_names(&self) -> String {
        format!("tonic-rdma-collective/{:032x}", u128::from_be_bytes(self.session.group))
    }

    /// Returns how long making links may take.
    pub(crate) fn bootstrap_timeout(&self) -> Duration {
        self.session.settings.bootstrap_timeout
    }

    /// Carries out `future` on the group's own runtime, and waits for its result on any other one.
    ///
    /// # Errors
    /// The future's, or the task has ended.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        future: impl Future<Output = Result<T, CollectiveError>> + Send + 'static,
    ) -> Result<T, CollectiveError> {
        self.session.runtime.run(future, setup).await
    }

    /// Returns the ranks on the host of this rank, with this rank.
    pub(crate) fn ranks_of_this_host(&self) -> Vec<usize> {
        let host = |original: usize| self.session.members.get(original).map(|member| member.host.as_str());
        let own = host(self.session.state.me);
        let ranks = self.epoch.members.iter().enumerate();
        ranks.filter(|(_, original)| host(**original) == own).map(|(rank, _)| rank).collect()
    }

    /// Returns the number of the host of each rank: the host that the rank has named, or else the one on which
    /// it runs. Equal on all ranks.
    pub(crate) fn hosts(&self) -> Vec<usize> {
        let mut names: Vec<&str> = Vec::new();
        let number = |original: &usize| {
            let member = self.session.members.get(*original)?;
            let name = if member.named_host.is_empty() { &member.host } else { &member.named_host };
            let known = names.iter().position(|known| known == name);
            if known.is_none() {
                names.push(name);
            }
            Some(known.unwrap_or(names.len() - 1))
        };
        self.epoch.members.iter().filter_map(number).collect()
    }

    /// Returns the number of cores that the process of a rank may use.
    pub(crate) fn cores(&self, rank: usize) -> usize {
        let member = self.original(rank).and_then(|original| self.session.members.get(original));
        member.map_or(1, |member| member.cores.max(1) as usize)
    }

    /// Returns the first failure of this generation.
    pub(crate) fn failure(&self) -> &Failure {
        &self.epoch.failure
    }

    /// Returns where the engine writes which step it is at.
    pub(crate) fn position(&self) -> &Position {
        &self.epoch.position
    }

    /// Sets the failure of this rank, if it is the first, and reports it to all other ranks, which then fail
    /// too. Returns at once.
    pub(crate) fn report(&self, error: CollectiveError) {
        if self.epoch.failure.set(error) {
            self.send_report();
        }
    }

    /// Reports the failure of this rank to all others. Each generation has one report, so that ranks that are
    /// behind find older ones.
    fn send_report(&self) {
        let Some(error) = self.epoch.failure.reason() else { return };
        let generation = self.epoch.generation;
        self.session.bootstrap.standing.send_if_modified(|standing| {
            let reports = &mut standing.details.reports;
            if reports.iter().any(|report| report.generation == generation) {
                return false;
            }
            reports.push(Report {
                generation,
                message: shortened(&error.to_string()),
                loss: self.loss(error),
            });
            reports.drain(..reports.len().saturating_sub(REPORTS));
            true
        });
    }

    /// Returns what other ranks have to know if `error` is the loss of a rank, so that it is the loss of this
    /// rank on all of them.
    fn loss(&self, error: &CollectiveError) -> Option<Loss> {
        let rank = self.original(error.lost_rank()?)? as u32;
        Some(Loss { rank, reason: shortened(error.loss()?) })
    }

    /// Returns the rank that the others wait for. Begins at the rank that this rank waits for, asks it which
    /// rank it waits for, and so on. The first rank that does not answer in time, waits for no other or for
    /// this rank, or is in another generation, is the culprit. In a ring of other ranks it is the first
    /// suspect.
    pub(crate) async fn find_culprit(&self, first_suspect: usize) -> usize {
        let this = self.clone();
        let found = self.run(async move { Ok(this.follow(first_suspect).await) }).await;
        found.unwrap_or(first_suspect)
    }

    async fn follow(&self, first_suspect: usize) -> usize {
        let mut suspect = first_suspect;
        let mut asked = vec![false; self.size()];
        loop {
            let Some(original) = self.original(suspect) else { return first_suspect };
            let Some(Some(other)) = self.session.peers.get(original) else { return first_suspect };
            match asked.get_mut(suspect) {
                // The ranks wait for one another in a ring, so nothing follows from that.
                Some(true) | None => return first_suspect,
                Some(asked) => *asked = true,
            }
            let Ok(status) =
                other.peer.status(&self.session.group, self.session.settings.answer_timeout).await
            else {
                return suspect;
            };
            let next = status.waits_for.filter(|_| status.generation == self.epoch.generation);
            match next.and_then(|original| self.epoch.index(original as usize)) {
                Some(next) if next == self.rank() => return suspect,
                Some(next) => suspect = next,
                None => return suspect,
            }
        }
    }

    /// Agrees with the other living ranks on the survivors, and returns their group. Their ranks are new, in
    /// the old order, and the channels are the same. To be called on every survivor. This generation has
    /// failed from then on, on all ranks. Calling it again gives the same answer.
    ///
    /// # Errors
    /// - [`Excluded`](CollectiveErrorKind::Excluded): the others go on without this rank.
    /// - [`Setup`](CollectiveErrorKind::Setup): there was no agreement in time.
    pub(crate) async fn survivors(&self) -> Result<Self, CollectiveError> {
        let shrinks = "this rank has asked for the group of the survivors";
        self.epoch.failure.set(CollectiveError::new(CollectiveErrorKind::Revoked, None, shrinks));
        // Ranks that have noticed no failure come to the agreement too.
        self.send_report();
        let this = self.clone();
        let epoch = self.run(async move { survivors::agree(&this.session, &this.epoch).await }).await?;
        Ok(Self { session: Arc::clone(&self.session), epoch })
    }
}

#[cfg(test)]
mod tests;
