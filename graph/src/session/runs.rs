//! Which steps the parts run.
//!
//! A slot has no room for the number of a step: its n-th tensor is the sender's n-th tensor. So all parts have to run the same steps. Each
//! part tells the others the steps of each of its runs, and both ends compare. A part that takes tensors out of slots does not end a run
//! well before it knows that the senders run the same steps.

use std::ops::Range;

use crate::placement::Part;
use crate::session::state::State;
use crate::transfer::proto::Run;
use crate::transfer::{Mode, RunsOfParts};

impl RunsOfParts for State {
    fn begin(&self, mode: Mode, steps: &Range<u64>) -> Option<u64> {
        if steps.is_empty() {
            return None;
        }
        let mut number = 0;
        self.meeting.standing.send_modify(|standing| {
            let runs = &mut standing.details.runs;
            let of_mode = |run: &&Run| run.mode == mode.number();
            number = runs.iter().rfind(of_mode).map_or(0, |run| run.number + 1);
            runs.push(Run { mode: mode.number(), number, first: steps.start, end: steps.end });
            // A receiver may be as many runs behind as a slot has buffers, and one more that waits.
            if runs.iter().filter(of_mode).count() > self.window + 2
                && let Some(oldest) = runs.iter().position(|run| run.mode == mode.number())
            {
                runs.remove(oldest);
            }
        });
        for peer in (0..self.parts).map(Part).filter(|peer| *peer != self.me) {
            self.compare_runs(peer);
        }
        Some(number)
    }

    fn has_begun(&self, peer: Part, mode: Mode, number: u64) -> bool {
        // First, so that a part that runs other steps never counts.
        self.compare_runs(peer);
        let begun = |run: &Run| run.mode == mode.number() && run.number >= number;
        self.meeting.of(peer.0, |other| other.details.runs.iter().any(begun)).unwrap_or_default()
    }

    fn abort(&self, reason: &str) {
        self.meeting.fail(reason);
    }
}

impl State {
    /// Compares the runs of another part with those of this one. Notes the first run whose steps differ.
    pub(super) fn compare_runs(&self, peer: Part) {
        let found = {
            let ours = self.meeting.standing.borrow();
            self.meeting.of(peer.0, |other| difference(&ours.details.runs, &other.details.runs)).flatten()
        };
        if let Some((ours, theirs)) = found {
            let mode = Mode::of_number(ours.mode).map(|mode| mode.to_string()).unwrap_or_default();
            self.peers.runs_other_steps(peer, mode, ours.first..ours.end, theirs.first..theirs.end);
        }
    }
}

/// Returns the first run of both parts whose steps differ.
fn difference(ours: &[Run], theirs: &[Run]) -> Option<(Run, Run)> {
    ours.iter().find_map(|ours| {
        let same = |theirs: &&Run| (theirs.mode, theirs.number) == (ours.mode, ours.number);
        let theirs = theirs.iter().find(same)?;
        (theirs != ours).then_some((*ours, *theirs))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_run_with_other_steps_is_found() {
        let run = |mode, number, first, end| Run { mode, number, first, end };
        let ours = [run(5, 0, 0, 1), run(4, 0, 1, 3), run(5, 1, 3, 9)];
        assert_eq!(difference(&ours, &ours), None);
        assert_eq!(difference(&ours, &[]), None);
        assert_eq!(difference(&ours, &[run(5, 0, 0, 1), run(5, 1, 3, 9), run(5, 2, 9, 10)]), None);
        let theirs = [run(4, 0, 1, 3), run(5, 1, 4, 9)];
        assert_eq!(difference(&ours, &theirs), Some((ours[2], theirs[1])));
    }
}
