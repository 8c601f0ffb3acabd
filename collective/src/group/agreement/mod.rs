//! The agreement of survivors: what one rank knows, and what it does next. This module does no I/O and knows
//! no time.
//!
//! Ranks here are those of the bootstrap, which never change. A group has a number, its *generation*. Every
//! rank asks all others for their [`Standing`], again and again, until the agreement ends:
//!
//! ```text
//!  every rank    agreeing; asks all ranks that it does not suspect for their standing
//!  coordinator   the lowest rank that it does not suspect. When all others agree too: chooses a generation larger than every
//!                generation and promise that it has seen, and proposes it to all members
//!  members       promise, if they take the same rank for the coordinator, and have promised no larger generation
//!  coordinator   has the promises of all members: is in the new generation from now on
//!  members       see the new generation in the standing of the coordinator, or of any other member: are in it too
//! ```
//!
//! Why all survivors end with the same members, if a suspected rank is really dead:
//!
//! - *Two groups with a common member never have one generation.* Both need the promise of this member, and a
//!   member promises one generation once. So a generation means one list of members, for every rank that is
//!   in it.
//! - *A dead coordinator does no harm.* If any living rank saw the new generation, all its members see it at
//!   this rank. If none did, no living rank is in it, and the next coordinator proposes a larger one. There
//!   is no message "commit" that could reach one rank and miss another: the standing of each member is that
//!   message.
//! - *Ranks of different generations meet again.* A rank may already be in the new generation while its
//!   coordinator has died. That group contains a dead rank, so it fails at once, and this rank agrees again.
//!   The ranks still in the old generation see the larger one and follow.
//! - *It ends.* Suspicions only grow, so at some time the lowest living rank is the coordinator for all. It
//!   waits only for ranks that answer. A rank that does not answer becomes a suspect.
//!
//! A suspicion can be wrong: a rank was stopped and runs again, or one link has failed. Then some rank must
//! leave, so that the others have a group in which all reach one another. The rules:
//!
//! - The coordinator leaves out each rank that a lower rank suspects. Of two ranks that suspect one another,
//!   the higher leaves.
//! - A coordinator that a living rank suspects, and that does not suspect this rank itself, leaves.
//! - A rank that sees a larger generation without itself leaves.
//!
//! A rank that leaves gets the error [`Excluded`](crate::CollectiveErrorKind::Excluded), and tells all askers
//! that it has left, so that each of them suspects it too. Two ranks that can't reach one another, with no
//! third rank that reaches both, both go on alone. A majority rule would prevent that, but would also end a
//! group that lost half of its ranks.

use std::collections::BTreeMap;

/// What one rank knows and has promised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Standing {
    /// The number of the group in which the rank is.
    pub(crate) generation: u64,
    /// The members of this group, in order.
    pub(crate) members: Vec<usize>,
    /// Whether the rank waits for an agreement.
    pub(crate) agreeing: bool,
    /// The largest generation that the rank has promised to be in, or 0.
    pub(crate) promised: u64,
    /// The ranks that the rank itself found to be lost, and why.
    pub(crate) suspects: BTreeMap<usize, String>,
}

/// A group that a coordinator proposes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Proposal {
    pub(crate) generation: u64,
    pub(crate) coordinator: usize,
    pub(crate) members: Vec<usize>,
}

/// What a rank does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    /// Asks again, because an answer or an agreeing rank is missing.
    Wait,
    /// Proposes a group to its members.
    Propose(Proposal),
    /// Is in this group from now on.
    Adopt { generation: u64, members: Vec<usize> },
    /// Leaves, because of this reason.
    Leave(String),
}

impl Standing {
    /// Returns the coordinator, as rank `me` sees it: the lowest member that it does not suspect.
    pub(crate) fn coordinator(&self, me: usize) -> usize {
        let others = self.members.iter().copied().filter(|rank| !self.suspects.contains_key(rank));
        others.min().map_or(me, |lowest| lowest.min(me))
    }

    /// Returns the members that rank `me` asks for their standing.
    pub(crate) fn to_ask(&self, me: usize) -> Vec<usize> {
        let members = self.members.iter().copied();
        members.filter(|rank| *rank != me && !self.suspects.contains_key(rank)).collect()
    }

    /// Suspects a rank, for the first reason given.
    pub(crate) fn suspect(&mut self, rank: usize, reason: impl Into<String>) {
        self.suspects.entry(rank).or_insert_with(|| reason.into());
    }

    /// Returns what rank `me` does next. `answers` are the standings of other ranks.
    pub(crate) fn next(&self, me: usize, answers: &BTreeMap<usize, Self>) -> Move {
        if let Some(later) = self.later(me, answers) {
            return later;
        }
        if self.coordinator(me) != me {
            return Move::Wait;
        }
        let mut out: BTreeMap<usize, ()> = self.suspects.keys().map(|rank| (*rank, ())).collect();
        for (rank, answer) in answers {
            if out.contains_key(rank) {
                continue;
            }
            if let Some(reason) = answer.suspects.get(&me) {
                return Move::Leave(format!("rank {rank} found it lost: {reason}"));
            }
            out.extend(answer.suspects.keys().map(|suspect| (*suspect, ())));
        }
        let members: Vec<usize> =
            self.members.iter().copied().filter(|rank| !out.contains_key(rank)).collect();
        let all_agree =
            members.iter().all(|rank| *rank == me || answers.get(rank).is_some_and(|answer| answer.agreeing));
        if !all_agree {
            return Move::Wait;
        }
        let seen = answers.values().chain([self]).map(|it| it.generation.max(it.promised)).max();
        let generation = seen.unwrap_or(0).saturating_add(1);
        Move::Propose(Proposal { generation, coordinator: me, members })
    }

    /// Returns what a larger generation of another rank demands.
    fn later(&self, me: usize, answers: &BTreeMap<usize, Self>) -> Option<Move> {
        let (rank, latest) = answers
            .iter()
            .filter(|(_, answer)| answer.generation > self.generation)
            .max_by_key(|(_, answer)| answer.generation)?;
        if !latest.members.contains(&me) {
            return Some(Move::Leave(format!("rank {rank} is in a later group without it")));
        }
        // A smaller generation than the promised one: its group has lost a member, and a coordinator asks for
        // a new one.
        (latest.generation >= self.promised)
            .then(|| Move::Adopt { generation: latest.generation, members: latest.members.clone() })
    }

    /// Promises rank `me`'s part in a group.
    ///
    /// # Errors
    /// The reason why not.
    pub(crate) fn promise(&mut self, me: usize, proposal: &Proposal) -> Result<(), String> {
        let Proposal { generation, coordinator, members } = proposal;
        let newest = self.generation.max(self.promised);
        if !members.is_sorted_by(|one, other| one < other) || !members.contains(coordinator) {
            return Err(format!("{members:?} is no list of members with rank {coordinator}"));
        }
        if !members.contains(&me) {
            return Err(format!("rank {me} is not among the members"));
        }
        if !self.agreeing {
            return Err(format!("rank {me} does not wait for an agreement"));
        }
        if *generation <= newest {
            return Err(format!("generation {generation}, and rank {me} has promised {newest}"));
        }
        let expected = self.coordinator(me);
        if *coordinator != expected {
            return Err(format!(
                "rank {coordinator} proposes, and rank {me} takes rank {expected} for the coordinator"
            ));
        }
        if let Some((rank, reason)) = self.suspects.iter().find(|(rank, _)| members.contains(rank)) {
            return Err(format!("rank {me} found rank {rank} lost: {reason}"));
        }
        self.promised = *generation;
        Ok(())
    }

    /// Begins to be in a group.
    pub(crate) fn adopt(&mut self, generation: u64, members: Vec<usize>) {
        self.generation = generation;
        self.promised = self.promised.max(generation);
        self.members = members;
        self.agreeing = false;
    }
}

#[cfg(test)]
mod tests;
