//! The agreement of survivors, carried out over calls. [`agreement`](crate::group::agreement) has the rules.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::Code;

use crate::error::{CollectiveError, setup};
use crate::group::agreement::{Move, Proposal, Standing};
use crate::group::calls::standing_of;
use crate::group::session::Session;
use crate::group::state::Epoch;

/// A rank that answers no call for this many times the limit of an answer is suspected to be lost. On a busy
/// machine a rank may have to wait for a core.
const SILENCE: u32 = 6;

/// An agreement may last this many times the limit for a rank that lives and does not agree.
const MOST_TIMEOUTS: u32 = 4;

/// The pause between two rounds of questions: it begins small, because most agreements are over in two
/// rounds.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// Agrees with the other living ranks, and returns the generation of the survivors.
pub(super) async fn agree(session: &Session, epoch: &Epoch) -> Result<Arc<Epoch>, CollectiveError> {
    let state = &session.state;
    if let Some(reason) = state.left_reason() {
        return Err(CollectiveError::excluded(epoch.rank, &reason));
    }
    if let Some(later) = state.agree(epoch.generation, true) {
        return Ok(later);
    }
    let _ends = NotAgreeing { session, generation: epoch.generation };
    let begun = Instant::now();
    let mut silent: BTreeMap<usize, Instant> = BTreeMap::new();
    let mut pause = FIRST_PAUSE;
    loop {
        let waited = begun.elapsed();
        if waited >= session.settings.agreement_timeout * MOST_TIMEOUTS {
            return Err(setup(format!(
                "the survivors did not agree within {waited:?}: no proposal got the promise of all its members"
            )));
        }
        let answers = ask_all(session, &mut silent).await;
        match state.next(&answers) {
            Move::Adopt { generation, members } => {
                if let Some(next) = state.adopt(generation, members) {
                    return Ok(next);
                }
            }
            Move::Leave(reason) => {
                let reason: Arc<str> = reason.into();
                // The others must not wait for this rank.
                state.leave(&reason);
                return Err(CollectiveError::excluded(epoch.rank, &reason));
            }
            Move::Propose(proposal) => {
                if propose(session, &proposal).await
                    && let Some(next) = state.adopt(proposal.generation, proposal.members)
                {
                    return Ok(next);
                }
            }
            Move::Wait => suspect_late_ranks(session, &answers, begun)?,
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Asks all ranks that this rank does not suspect. Suspects those that have been silent for too long.
async fn ask_all(session: &Session, silent: &mut BTreeMap<usize, Instant>) -> BTreeMap<usize, Standing> {
    let state = &session.state;
    let (standing, _) = state.standing();
    let mut asking = JoinSet::new();
    let begun = Instant::now();
    for rank in standing.to_ask(state.me) {
        let Some(Some(other)) = session.peers.get(rank) else { continue };
        let (peer, group, limit) = (other.peer.clone(), session.group, session.settings.answer_timeout);
        asking.spawn(async move { (rank, peer.status(&group, limit).await) });
    }
    let mut answers = BTreeMap::new();
    while let Some(Ok((rank, answer))) = asking.join_next().await {
        match answer {
            Ok(reply) => {
                silent.remove(&rank);
                answers.insert(rank, standing_of(reply, state.size));
            }
            Err(status) if status.code() == Code::Aborted => state.suspect(rank, status.message()),
            Err(_) => {
                let since = *silent.entry(rank).or_insert(begun);
                let limit = session.settings.answer_timeout * SILENCE;
                if since.elapsed() >= limit {
                    state.suspect(rank, &format!("it did not answer for {limit:?}"));
                }
            }
        }
    }
    answers
}

/// Asks all members of a proposal for their promise. Returns whether all have given it.
async fn propose(session: &Session, proposal: &Proposal) -> bool {
    let state = &session.state;
    if state.promise(proposal).is_err() {
        return false;
    }
    let mut asking = JoinSet::new();
    for rank in proposal.members.iter().copied().filter(|rank| *rank != state.me) {
        let Some(Some(other)) = session.peers.get(rank) else { return false };
        let (peer, group, proposal) = (other.peer.clone(), session.group, proposal.clone());
        let limit = session.settings.answer_timeout;
        asking.spawn(async move { peer.propose(&group, &proposal, limit).await });
    }
    let mut all = true;
    while let Some(answer) = asking.join_next().await {
        all &= matches!(answer, Ok(Ok(true)));
    }
    all
}

/// Suspects, as the coordinator, the ranks that live and do not agree for too long. Other ranks end with an
/// error when the coordinator has had twice its time.
fn suspect_late_ranks(
    session: &Session,
    answers: &BTreeMap<usize, Standing>,
    begun: Instant,
) -> Result<(), CollectiveError> {
    let waited = begun.elapsed();
    if waited < session.settings.agreement_timeout {
        return Ok(());
    }
    let state = &session.state;
    let (standing, _) = state.standing();
    if standing.coordinator(state.me) == state.me {
        let limit = session.settings.agreement_timeout;
        for (rank, _) in answers.iter().filter(|(_, answer)| !answer.agreeing) {
            state.suspect(*rank, &format!("it lives, and did not take part in the agreement for {limit:?}"));
        }
        return Ok(());
    }
    if waited < session.settings.agreement_timeout * 2 {
        return Ok(());
    }
    let coordinator = standing.coordinator(state.me);
    Err(setup(format!(
        "the survivors did not agree within {waited:?}: rank {coordinator} has to propose and does not"
    )))
}

/// Says that this rank does not wait for an agreement any more, also if the caller stops waiting.
struct NotAgreeing<'a> {
    session: &'a Session,
    generation: u64,
}

impl Drop for NotAgreeing<'_> {
    fn drop(&mut self) {
        self.session.state.agree(self.generation, false);
    }
}
