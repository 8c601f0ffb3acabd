//! A model of the time that plans take on several hosts: it carries out all steps of all ranks in order of their
//! times. A rank does one step at a time, and the ranks of a host share the two directions of its network card.

use std::collections::{BTreeMap, VecDeque};

use super::{Arguments, plans};
use crate::plan::{Action, Plan};

/// The time of a rank for each message that it sends or takes, and of a message between hosts on its way. In µs.
const MESSAGE: f64 = 0.3;
const NETWORK: f64 = 2.6;
/// What a rank adds or copies, in bytes per µs.
const RANK: f64 = 8_000.0;
/// Messages of up to this many bytes carry their elements.
const INLINE: usize = 16 << 10;
/// A rank sends this many messages to another before that one takes the first.
const DEPTH: usize = 8;

/// A message on its way: when it arrives, and the sender's step.
type Sent = (f64, usize);

/// Steps in order: those that send to a rank, those of no other rank, and those that receive from a rank. Of the
/// steps that can begin, a rank takes the first in this order, as the engine does.
type Queues = BTreeMap<(Kind, usize), VecDeque<usize>>;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Send,
    Local,
    Receive,
}

struct Model {
    /// What a card moves in each direction, in bytes per µs.
    card: f64,
    plans: Vec<Plan>,
    hosts: Vec<usize>,
    /// When each step was done.
    done: Vec<Vec<Option<f64>>>,
    /// The steps of each rank that have not begun, by queue.
    queues: Vec<Queues>,
    links: BTreeMap<(usize, usize), VecDeque<Sent>>,
    /// When each rank, and each direction of each card, is free again.
    free: Vec<f64>,
    cards: [Vec<f64>; 2],
}

/// Returns how long an operation on bytes takes between hosts with cards of `gbits` Gb/s, in µs.
pub(super) fn micros(arguments: &Arguments, gbits: u32) -> f64 {
    let plans = plans(arguments);
    let hosts: Vec<usize> = (0..arguments.ranks).map(|rank| arguments.hosts.of(rank)).collect();
    let mut model = Model {
        card: f64::from(gbits) * 125.0,
        done: plans.iter().map(|plan| vec![None; plan.steps.len()]).collect(),
        queues: plans.iter().map(queues).collect(),
        links: BTreeMap::new(),
        free: vec![0.0; plans.len()],
        cards: [(); 2].map(|()| vec![0.0; hosts.len()]),
        plans,
        hosts,
    };
    let mut next: Vec<Option<(f64, usize)>> = (0..arguments.ranks).map(|rank| model.next(rank)).collect();
    let earliest = |next: &[Option<(f64, usize)>]| {
        let known = next.iter().enumerate().filter_map(|(rank, next)| Some((rank, (*next)?)));
        known.min_by(|(_, one), (_, other)| one.0.total_cmp(&other.0))
    };
    while let Some((rank, (start, step))) = earliest(&next) {
        for changed in model.carry_out(rank, step, start) {
            next[changed] = model.next(changed);
        }
    }
    let all = model.done.iter().flatten().map(|done| done.expect("the plans wait for one another"));
    all.fold(0.0, f64::max)
}

/// Returns the queue of a step.
fn queue(action: &Action) -> (Kind, usize) {
    match action {
        Action::Send { to, .. } => (Kind::Send, *to),
        Action::Receive { from, .. } => (Kind::Receive, *from),
        Action::Local { .. } | Action::Finish { .. } => (Kind::Local, 0),
    }
}

fn queues(plan: &Plan) -> Queues {
    let mut queues = Queues::new();
    for (index, step) in plan.steps.iter().enumerate() {
        queues.entry(queue(&step.action)).or_default().push_back(index);
    }
    queues
}

impl Model {
    /// Returns the step that a rank can begin first, and when.
    fn next(&self, rank: usize) -> Option<(f64, usize)> {
        let of = |((kind, other), queue): (&(Kind, usize), &VecDeque<usize>)| {
            let step = *queue.front()?;
            let after = self.plans[rank].steps[step].after.iter().map(|step| self.done[rank][*step as usize]);
            let ready =
                after.into_iter().try_fold(self.free[rank], |latest, done| Some(latest.max(done?)))?;
            let arrives = match kind {
                Kind::Receive => self.links.get(&(*other, rank))?.front()?.0,
                Kind::Send if self.links.get(&(rank, *other)).is_some_and(|link| link.len() >= DEPTH) => {
                    None?
                }
                Kind::Send | Kind::Local => 0.0,
            };
            Some((ready.max(arrives), step))
        };
        self.queues[rank].iter().filter_map(of).min_by(|one, other| one.0.total_cmp(&other.0))
    }

    /// Carries out a step, and returns the ranks for which something has changed.
    fn carry_out(&mut self, rank: usize, step: usize, start: f64) -> Vec<usize> {
        let queue = queue(&self.plans[rank].steps[step].action);
        let (changed, end) = match &self.plans[rank].steps[step].action {
            Action::Send { to, from } => {
                let (to, bytes, mut arrives) = (*to, from.range.len(), start + 2.0 * MESSAGE);
                let (own, other) = (self.hosts[rank], self.hosts[to]);
                if own != other {
                    // The switch between the cards has room for what the receiver's card does not take yet.
                    let begin = self.cards[0][own].max(start + MESSAGE);
                    let takes = bytes as f64 / self.card;
                    self.cards[0][own] = begin + takes;
                    self.cards[1][other] = self.cards[1][other].max(begin) + takes;
                    arrives = self.cards[1][other] + NETWORK;
                }
                self.links.entry((rank, to)).or_default().push_back((arrives, step));
                if bytes <= INLINE {
                    self.done[rank][step] = Some(start + MESSAGE);
                }
                (vec![rank, to], start + MESSAGE)
            }
            Action::Receive { from, into, .. } => {
                let end = start + MESSAGE + into.range.len() as f64 / RANK;
                let sent = self.links.get_mut(&(*from, rank)).and_then(VecDeque::pop_front);
                let (_, sent) = sent.expect("a message has arrived");
                self.done[*from][sent].get_or_insert(end);
                self.done[rank][step] = Some(end);
                (vec![rank, *from], end)
            }
            _ => {
                self.done[rank][step] = Some(start);
                (vec![rank], start)
            }
        };
        self.queues[rank].get_mut(&queue).and_then(VecDeque::pop_front);
        self.free[rank] = end;
        changed
    }
}
