//! Carries out the plans of all ranks in a random interleaving, and checks each step.
//!
//! A step begins at any time after the steps of its `after`, but the messages between two ranks keep their
//! order. It ends at any later time. A `Send` either copies its elements, or refers to them until the
//! receiver has taken the message. A link has room for a few messages.

use std::collections::VecDeque;
use std::ops::Range;

use crate::plan::builder::{reads, writes};
use crate::plan::{Action, Area, Arguments, Collective, Plan, Span, part};

/// An element during an operation: which contributions it has, and in which order they were reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Value {
    element: usize,
    contributions: u128,
    /// A hash of the tree of reductions. The order of the two operands of a reduction makes no difference, as
    /// it makes none for the bits.
    tree: u64,
    /// The bits of an f32. There is one NaN.
    number: u32,
    is_finished: bool,
}

impl Value {
    fn contribution(rank: usize, element: usize) -> Self {
        let number = number(rank, element).to_bits();
        Self { element, contributions: 1 << rank, tree: mixed(1, rank as u64), number, is_finished: false }
    }

    fn reduced(self, other: Self) -> Self {
        assert_eq!(self.element, other.element, "two elements are mixed up");
        assert_eq!(
            self.contributions & other.contributions,
            0,
            "a contribution counts twice: {self:?}, {other:?}"
        );
        assert!(!self.is_finished && !other.is_finished, "a final element is reduced: {self:?}, {other:?}");
        let sum = f32::from_bits(self.number) + f32::from_bits(other.number);
        Self {
            element: self.element,
            contributions: self.contributions | other.contributions,
            tree: mixed(self.tree.min(other.tree), self.tree.max(other.tree)),
            number: if sum.is_nan() { f32::NAN } else { sum }.to_bits(),
            is_finished: false,
        }
    }

    fn finished(self, ranks: usize) -> Self {
        assert!(!self.is_finished, "an element is finished twice: {self:?}");
        assert_eq!(self.contributions, all(ranks), "an element is finished before all contributions are in");
        let mean = f32::from_bits(self.number) / ranks as f32;
        Self { is_finished: true, number: if mean.is_nan() { f32::NAN } else { mean }.to_bits(), ..self }
    }
}

/// Returns the contribution of a rank: numbers whose sum depends on the order.
pub(super) fn number(rank: usize, element: usize) -> f32 {
    const AWKWARD: [f32; 9] = [1e30, -1e30, 0.1, -0.0, 3e-39, 16_777_216.0, 1.0, -0.3, f32::MAX];
    let hash = mixed(rank as u64 + 1, element as u64);
    match hash % 11 {
        index @ 0..9 => AWKWARD[index as usize],
        _ => (hash >> 40) as f32 / 1000.0,
    }
}

fn all(ranks: usize) -> u128 {
    u128::MAX >> (128 - ranks)
}

fn mixed(one: u64, other: u64) -> u64 {
    let mut hash =
        one.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ other.rotate_left(31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash ^= hash >> 29;
    hash = hash.wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 32)
}

/// How the links behave while the plans of one operation are carried out.
#[derive(Clone, Debug)]
pub(super) struct LinkConditions {
    /// For each rank, the largest number of elements of its messages that are always copied.
    pub(super) inline: Vec<usize>,
    /// The percentage of longer messages that are copied too.
    pub(super) copied_percent: u64,
    /// The number of messages for which a link has room.
    pub(super) depth: usize,
    /// A rank that does something only when no other rank can.
    pub(super) slow: Option<usize>,
}

/// Carries out all plans in the order that `seed` gives. Returns the results of all ranks, after it has
/// checked them.
pub(super) fn carry_out(
    arguments: &Arguments,
    plans: &[Plan],
    links: LinkConditions,
    seed: u64,
) -> Vec<Vec<Value>> {
    let mut group = Group::new(arguments, plans, links, seed);
    while group.event() {}
    for (number, rank) in group.ranks.iter().enumerate() {
        let waiting: Vec<_> =
            (0..rank.plan.steps.len()).filter(|step| rank.states[*step] != StepState::Done).collect();
        assert!(waiting.is_empty(), "rank {number} waits forever: {waiting:?} of {:#?}", rank.plan);
    }
    assert!(group.links.iter().all(VecDeque::is_empty), "a message is left");
    let results: Vec<_> = (0..arguments.ranks).map(|rank| group.result(rank)).collect();
    check(arguments, &results);
    results
}

/// Checks that each rank has what the operation says, and that all have the same.
fn check(arguments: &Arguments, results: &[Vec<Value>]) {
    for (rank, result) in results.iter().enumerate() {
        let range = match arguments.collective {
            Collective::Barrier => 0..0,
            Collective::ReduceScatter => part(arguments.elements, arguments.ranks, rank),
            _ => 0..arguments.elements,
        };
        assert_eq!(result.len(), range.len(), "rank {rank}");
        for (value, element) in result.iter().zip(range) {
            assert_eq!(value.element, element, "rank {rank}");
            match arguments.collective {
                Collective::AllReduce | Collective::ReduceScatter => {
                    assert!(value.is_finished, "rank {rank}, element {element} is not finished");
                    assert_eq!(value.contributions, all(arguments.ranks), "rank {rank}, element {element}");
                }
                Collective::AllGather => {
                    let of =
                        |owner: &usize| part(arguments.elements, arguments.ranks, *owner).contains(&element);
                    let owner = (0..arguments.ranks).find(of).expect("each element has an owner");
                    assert_eq!(*value, Value::contribution(owner, element), "rank {rank}");
                }
                Collective::Broadcast { root } => {
                    assert_eq!(*value, Value::contribution(root, element), "rank {rank}");
                }
                Collective::Barrier => {}
            }
            if !matches!(arguments.collective, Collective::ReduceScatter) {
                assert_eq!(*value, results[0][element], "ranks {rank} and 0 differ");
            }
        }
    }
}

impl LinkConditions {
    /// Returns links that copy nothing.
    pub(super) fn references(ranks: usize) -> Self {
        Self { inline: vec![0; ranks], copied_percent: 0, depth: 8, slow: None }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepState {
    /// Waits for this number of steps.
    Waits(usize),
    Runs,
    Done,
}

#[derive(Debug)]
struct Rank<'a> {
    plan: &'a Plan,
    areas: [Vec<Option<Value>>; 2],
    states: Vec<StepState>,
    /// For each step, the steps that wait for it.
    waiters: Vec<Vec<usize>>,
    /// The running steps.
    running: Vec<usize>,
    /// For each other rank, the steps that send to it, and those that receive from it, in order.
    sends: Vec<VecDeque<usize>>,
    receives: Vec<VecDeque<usize>>,
}

#[derive(Debug)]
struct Message {
    step: usize,
    /// The elements, if they were copied.
    copy: Option<Vec<Value>>,
    is_being_taken: bool,
}

#[derive(Debug)]
struct Group<'a> {
    arguments: &'a Arguments,
    ranks: Vec<Rank<'a>>,
    /// The messages from rank a to rank b, at a · N + b.
    links: Vec<VecDeque<Message>>,
    settings: LinkConditions,
    /// Steps that wait for no other step, and may begin if their link lets them. A running one waits here for
    /// its end.
    candidates: Vec<(usize, usize)>,
    random: fastrand::Rng,
    /// How many ranks have begun, and so called, a barrier; how many ranks have ended it.
    begun: Vec<bool>,
}

impl<'a> Group<'a> {
    fn new(arguments: &'a Arguments, plans: &'a [Plan], settings: LinkConditions, seed: u64) -> Self {
        let ranks: Vec<_> =
            plans.iter().enumerate().map(|(rank, plan)| Rank::new(arguments, plan, rank)).collect();
        let mut candidates = Vec::new();
        for (number, rank) in ranks.iter().enumerate() {
            let ready = |step: &usize| rank.states[*step] == StepState::Waits(0);
            candidates.extend((0..rank.states.len()).filter(ready).map(|step| (number, step)));
        }
        let links = (0..plans.len() * plans.len()).map(|_| VecDeque::new()).collect();
        let begun = vec![false; plans.len()];
        let random = fastrand::Rng::with_seed(seed);
        Self { arguments, ranks, links, settings, candidates, random, begun }
    }

    /// Begins or ends one random step. Returns false if there is none.
    fn event(&mut self) -> bool {
        if self.candidates.is_empty() {
            return false;
        }
        let count = self.candidates.len();
        let start = self.random.usize(..count);
        let indices = (start..start + count).map(|index| index % count);
        let is_slow = |index: &usize| Some(self.candidates[*index].0) == self.settings.slow;
        let in_turn = indices.clone().filter(|index| !is_slow(index)).chain(indices.filter(is_slow));
        let can = |(rank, step): (usize, usize)| {
            self.ranks[rank].states[step] == StepState::Runs || self.may_begin(rank, step)
        };
        let Some(index) = in_turn.into_iter().find(|index| can(self.candidates[*index])) else {
            return false;
        };
        let (rank, step) = self.candidates[index];
        if self.ranks[rank].states[step] == StepState::Runs {
            self.candidates.swap_remove(index);
            self.end(rank, step);
        } else {
            // A Send ends when its message is taken; all others wait for an event of their own.
            if matches!(self.ranks[rank].plan.steps[step].action, Action::Send { .. }) {
                self.candidates.swap_remove(index);
            }
            self.begin(rank, step);
        }
        true
    }

    fn may_begin(&self, rank: usize, step: usize) -> bool {
        let this = &self.ranks[rank];
        match &this.plan.steps[step].action {
            Action::Send { to, .. } => {
                let link = &self.links[rank * self.ranks.len() + to];
                this.sends[*to].front() == Some(&step) && link.len() < self.settings.depth
            }
            Action::Receive { from, .. } => {
                let link = &self.links[from * self.ranks.len() + rank];
                this.receives[*from].front() == Some(&step) && !link.is_empty()
            }
            Action::Local { .. } | Action::Finish { .. } => true,
        }
    }

    fn begin(&mut self, rank: usize, step: usize) {
        self.begun[rank] = true;
        self.check_others(rank, step);
        let ranks = self.ranks.len();
        let this = &mut self.ranks[rank];
        this.states[step] = StepState::Runs;
        this.running.push(step);
        match &this.plan.steps[step].action {
            Action::Send { to, from } => {
                this.sends[*to].pop_front();
                let is_copied = from.range.len() <= self.settings.inline[rank]
                    || self.random.u64(0..100) < self.settings.copied_percent;
                let copy = is_copied.then(|| this.values(from));
                let to = *to;
                self.links[rank * ranks + to].push_back(Message { step, copy, is_being_taken: false });
                if is_copied {
                    self.done(rank, step);
                }
            }
            Action::Receive { from, into, .. } => {
                let message = self.links[from * ranks + rank].front_mut().expect("may_begin");
                assert!(!message.is_being_taken, "two steps take one message");
                message.is_being_taken = true;
                let Action::Send { from: sent, .. } = &self.ranks[*from].plan.steps[message.step].action
                else {
                    panic!("only a Send makes a message");
                };
                assert_eq!(
                    sent.range.len(),
                    into.range.len(),
                    "rank {rank}, step {step}: the length of the message"
                );
            }
            Action::Local { .. } | Action::Finish { .. } => {}
        }
    }

    fn end(&mut self, rank: usize, step: usize) {
        let arguments = self.arguments;
        let plan = self.ranks[rank].plan;
        match &plan.steps[step].action {
            Action::Send { .. } => unreachable!("a Send ends when its message is taken"),
            Action::Receive { from, into, reduce } => {
                self.ranks[rank].receives[*from].pop_front();
                let link = from * self.ranks.len() + rank;
                let message = self.links[link].pop_front().expect("taken once");
                let sender = self.ranks[*from].plan;
                let received = match (message.copy, &sender.steps[message.step].action) {
                    (Some(copy), _) => copy,
                    (None, Action::Send { from: span, .. }) => {
                        let values = self.ranks[*from].values(span);
                        self.done(*from, message.step);
                        values
                    }
                    _ => panic!("only a Send makes a message"),
                };
                self.ranks[rank].write(into, reduce.as_ref(), received);
            }
            Action::Local { with, into, reduce } => {
                let values = self.ranks[rank].values(with);
                self.ranks[rank].write(into, Some(reduce), values);
            }
            Action::Finish { span } => {
                let values = self.ranks[rank].values(span);
                let finished = values.into_iter().map(|value| value.finished(arguments.ranks)).collect();
                self.ranks[rank].write(span, None, finished);
            }
        }
        self.done(rank, step);
        if arguments.collective == Collective::Barrier && self.ranks[rank].is_done() {
            assert!(
                self.begun.iter().all(|begun| *begun),
                "rank {rank} passed the barrier before all ranks came"
            );
        }
    }

    fn done(&mut self, rank: usize, step: usize) {
        let this = &mut self.ranks[rank];
        this.states[step] = StepState::Done;
        this.running.retain(|other| *other != step);
        for waiter in std::mem::take(&mut this.waiters[step]) {
            let StepState::Waits(count) = &mut this.states[waiter] else { panic!("{waiter} did not wait") };
            *count -= 1;
            if *count == 0 {
                self.candidates.push((rank, waiter));
            }
        }
    }

    /// Checks that no running step writes what this step uses, or uses what this step writes.
    fn check_others(&self, rank: usize, step: usize) {
        let this = &self.ranks[rank];
        let action = &this.plan.steps[step].action;
        for other in &this.running {
            let running = &this.plan.steps[*other].action;
            for (written, used) in [(writes(action), running), (writes(running), action)] {
                let used = reads(used).into_iter().flatten().chain(writes(used));
                let overlaps = |used: &Span| written.is_some_and(|written| overlap(written, used));
                for span in used {
                    assert!(
                        !overlaps(span),
                        "rank {rank}: step {step} {action:?} and step {other} {running:?} run together"
                    );
                }
            }
        }
    }

    /// Returns what the rank got.
    fn result(&self, rank: usize) -> Vec<Value> {
        let range = match self.arguments.collective {
            Collective::Barrier => 0..0,
            Collective::ReduceScatter => part(self.arguments.elements, self.arguments.ranks, rank),
            _ => 0..self.arguments.elements,
        };
        self.ranks[rank].values(&Span { area: Area::Work, range })
    }
}

impl<'a> Rank<'a> {
    fn new(arguments: &Arguments, plan: &'a Plan, rank: usize) -> Self {
        let is_given = |element: &usize| match arguments.collective {
            Collective::AllGather => part(arguments.elements, arguments.ranks, rank).contains(element),
            Collective::Broadcast { root } => rank == root,
            _ => true,
        };
        let given = |element| is_given(&element).then(|| Value::contribution(rank, element));
        let work = (0..arguments.elements).map(given).collect();
        let mut waiters = vec![Vec::new(); plan.steps.len()];
        for (index, step) in plan.steps.iter().enumerate() {
            for earlier in &step.after {
                waiters[*earlier as usize].push(index);
            }
        }
        let mut sends = vec![VecDeque::new(); arguments.ranks];
        let mut receives = sends.clone();
        for (index, step) in plan.steps.iter().enumerate() {
            match step.action {
                Action::Send { to, .. } => sends[to].push_back(index),
                Action::Receive { from, .. } => receives[from].push_back(index),
                _ => {}
            }
        }
        Self {
            plan,
            areas: [work, vec![None; plan.scratch]],
            states: plan.steps.iter().map(|step| StepState::Waits(step.after.len())).collect(),
            waiters,
            running: Vec::new(),
            sends,
            receives,
        }
    }

    fn is_done(&self) -> bool {
        self.states.iter().all(|state| *state == StepState::Done)
    }

    /// Returns the values of a span. All must be there.
    fn values(&self, span: &Span) -> Vec<Value> {
        let area = &self.areas[span.area as usize];
        let read =
            |value: &Option<Value>| value.unwrap_or_else(|| panic!("{span:?} is read before it is written"));
        area[span.range.clone()].iter().map(read).collect()
    }

    fn write(&mut self, into: &Span, reduce: Option<&Span>, values: Vec<Value>) {
        let values = match reduce {
            None => values,
            Some(span) => {
                let own = self.values(span);
                assert_eq!(own.len(), values.len(), "the length of {span:?}");
                own.into_iter().zip(values).map(|(own, other)| own.reduced(other)).collect()
            }
        };
        assert_eq!(values.len(), into.range.len(), "the length of {into:?}");
        let area = &mut self.areas[into.area as usize];
        for (index, value) in area[into.range.clone()].iter_mut().zip(values) {
            *index = Some(value);
        }
    }
}

/// Returns whether two spans have an element in common.
pub(super) fn overlap(one: &Span, other: &Span) -> bool {
    let disjoint =
        |one: &Range<usize>, other: &Range<usize>| one.end <= other.start || other.end <= one.start;
    one.area == other.area
        && !one.range.is_empty()
        && !other.range.is_empty()
        && !disjoint(&one.range, &other.range)
}

/// Returns the sum of the contributions of all ranks to an element, in the order of the ranks, divided by
/// their number.
pub(super) fn in_order_of_ranks(ranks: usize, element: usize) -> u32 {
    let contributions = (0..ranks).map(|rank| Value::contribution(rank, element));
    contributions.reduce(Value::reduced).expect("there is a rank").finished(ranks).number
}

impl Value {
    pub(super) fn bits(self) -> u32 {
        self.number
    }
}
