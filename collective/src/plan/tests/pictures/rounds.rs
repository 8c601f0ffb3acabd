//! Carries out the plans of all ranks in rounds: in each round, every rank sends all that is ready at the
//! begin of the round.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::plan::{Action, Area, Arguments, Plan, Span};

/// The ranks whose elements are in a sum, one bit for each rank.
pub(super) type Sum = u32;

/// A message of a round.
#[derive(Clone, Debug)]
pub(super) struct Message {
    pub(super) from: usize,
    pub(super) to: usize,
    /// The elements at the receiver.
    pub(super) range: Range<usize>,
    /// Whether the receiver adds the elements to its own.
    pub(super) reduces: bool,
}

/// What happened in an operation in place.
#[derive(Debug)]
pub(super) struct History {
    /// The sums in the area Work of each rank: at the start, and after each round.
    pub(super) states: Vec<Vec<Vec<Sum>>>,
    pub(super) rounds: Vec<Vec<Message>>,
}

/// A message on its way: the sender's step, and the sums.
type Sent = (usize, Vec<Sum>);

struct Machine {
    plans: Vec<Plan>,
    sent: Vec<Vec<bool>>,
    done: Vec<Vec<bool>>,
    links: BTreeMap<(usize, usize), VecDeque<Sent>>,
    work: Vec<Vec<Sum>>,
    scratch: Vec<Vec<Sum>>,
    round: Vec<Message>,
    /// The largest number of elements of a message that is sent as a copy, so that its step is done at once.
    inline: usize,
}

impl History {
    pub(super) fn of(arguments: &Arguments) -> Self {
        let plans = super::super::plans(arguments);
        let mut machine = Machine::new(plans, arguments);
        let mut history = Self { states: vec![machine.work.clone()], rounds: Vec::new() };
        while !machine.done.iter().flatten().all(|done| *done) {
            machine.run();
            history.states.push(machine.work.clone());
            history.rounds.push(std::mem::take(&mut machine.round));
        }
        history
    }

    /// Returns the number of elements that a rank sends.
    pub(super) fn elements_sent(&self, rank: usize) -> usize {
        let messages = self.rounds.iter().flatten().filter(|message| message.from == rank);
        messages.map(|message| message.range.len()).sum()
    }
}

impl Machine {
    fn new(plans: Vec<Plan>, arguments: &Arguments) -> Self {
        let steps: Vec<Vec<bool>> = plans.iter().map(|plan| vec![false; plan.steps.len()]).collect();
        Self {
            sent: steps.clone(),
            done: steps,
            links: BTreeMap::new(),
            work: (0..plans.len()).map(|rank| vec![1 << rank; arguments.elements]).collect(),
            scratch: plans.iter().map(|plan| vec![0; plan.scratch]).collect(),
            plans,
            round: Vec::new(),
            inline: arguments.inline,
        }
    }

    fn run(&mut self) {
        let sends = self.each_ready(|action| matches!(action, Action::Send { .. }));
        for (rank, step) in sends {
            let Action::Send { to, from } = self.plans[rank].steps[step].action.clone() else { continue };
            let sums = self.memory(rank, from.area)[from.range].to_vec();
            self.done[rank][step] = sums.len() <= self.inline;
            self.sent[rank][step] = true;
            self.links.entry((rank, to)).or_default().push_back((step, sums));
        }
        let mut moved = true;
        while moved {
            moved = false;
            for (rank, step) in self.each_ready(|action| !matches!(action, Action::Send { .. })) {
                moved |= self.carry_out(rank, step);
            }
        }
        assert!(!self.round.is_empty(), "the plans wait for one another");
    }

    /// Returns the steps that have not begun and wait for no other step.
    fn each_ready(&self, is_wanted: impl Fn(&Action) -> bool) -> Vec<(usize, usize)> {
        let ready = |rank: usize, step: usize| {
            let after = &self.plans[rank].steps[step].after;
            !self.done[rank][step]
                && !self.sent[rank][step]
                && after.iter().all(|earlier| self.done[rank][*earlier as usize])
                && is_wanted(&self.plans[rank].steps[step].action)
        };
        let steps =
            (0..self.plans.len()).flat_map(|rank| (0..self.plans[rank].steps.len()).map(move |s| (rank, s)));
        steps.filter(|(rank, step)| ready(*rank, *step)).collect()
    }

    /// Carries out a step that sends nothing, if its message is there.
    fn carry_out(&mut self, rank: usize, step: usize) -> bool {
        match self.plans[rank].steps[step].action.clone() {
            Action::Send { .. } => return false,
            Action::Receive { from, into, reduce } => {
                if self.is_overtaking(rank, step, from) {
                    return false;
                }
                let Some((sender, sums)) = self.links.entry((from, rank)).or_default().pop_front() else {
                    return false;
                };
                let reduces = reduce.is_some();
                self.round.push(Message { from, to: rank, range: into.range.clone(), reduces });
                self.put(rank, sums, into, reduce);
                self.done[from][sender] = true;
            }
            Action::Local { with, into, reduce } => {
                let sums = self.memory(rank, with.area)[with.range].to_vec();
                self.put(rank, sums, into, Some(reduce));
            }
            Action::Finish { .. } => {}
        }
        self.done[rank][step] = true;
        true
    }

    /// Returns whether an earlier step takes the next message of this link.
    fn is_overtaking(&self, rank: usize, step: usize, link: usize) -> bool {
        let earlier = self.plans[rank].steps[..step].iter().zip(&self.done[rank]);
        earlier
            .filter(|(_, done)| !**done)
            .any(|(earlier, _)| matches!(earlier.action, Action::Receive { from, .. } if from == link))
    }

    fn put(&mut self, rank: usize, mut sums: Vec<Sum>, into: Span, reduce: Option<Span>) {
        if let Some(reduce) = reduce {
            for (sum, own) in sums.iter_mut().zip(&self.memory(rank, reduce.area)[reduce.range]) {
                assert_eq!(*sum & own, 0, "rank {rank} adds the elements of a rank twice");
                *sum |= own;
            }
        }
        self.memory(rank, into.area)[into.range].copy_from_slice(&sums);
    }

    fn memory(&mut self, rank: usize, area: Area) -> &mut Vec<Sum> {
        match area {
            Area::Work => &mut self.work[rank],
            Area::Scratch => &mut self.scratch[rank],
        }
    }
}
