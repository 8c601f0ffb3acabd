//! The steps in flight: which values are there, and which nodes may run.

use std::collections::VecDeque;
use std::time::Duration;

use super::plan::{Plan, Source};

/// The steps in flight, the oldest first.
///
/// Nodes, receives and sends each see the steps in ascending order, so the oldest step ends first.
#[derive(Debug)]
pub(super) struct Flights<V> {
    flights: VecDeque<Flight<V>>,
    /// The step that each node runs next.
    node_steps: Vec<u64>,
    /// The step that each receive takes next.
    receive_steps: Vec<u64>,
}

/// A step in flight.
#[derive(Debug)]
pub(super) struct Flight<V> {
    pub(super) step: u64,
    pub(super) began: Duration,
    values: Vec<Held<V>>,
    /// The number of inputs that each node waits for.
    waits_for: Vec<usize>,
    nodes_left: usize,
    receives_left: usize,
    sends_left: usize,
}

#[derive(Debug)]
struct Held<V> {
    value: Option<V>,
    /// The number of inputs that are still to use it.
    uses: usize,
}

impl<V: Clone> Flights<V> {
    /// Begins before `first` step.
    pub(super) fn new(plan: &Plan, first: u64) -> Self {
        Self {
            flights: VecDeque::new(),
            node_steps: vec![first; plan.nodes.len()],
            receive_steps: vec![first; plan.receives.len()],
        }
    }

    pub(super) fn len(&self) -> usize {
        self.flights.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    /// Adds the next step. Tells which nodes are ready, and which receives are now due.
    pub(super) fn admit(&mut self, plan: &Plan, step: u64, began: Duration) -> Due {
        let values =
            plan.values.iter().map(|value| Held { value: None, uses: value.consumers.len() }).collect();
        let waits_for: Vec<usize> = plan.nodes.iter().map(|node| node.waits_for).collect();
        let runs = |(node, waits_for): (usize, &usize)| *waits_for == 0 && self.node_steps[node] == step;
        let nodes =
            waits_for.iter().enumerate().filter(|it| runs(*it)).map(|(node, _)| (step, node)).collect();
        let due = |receive: &usize| self.receive_steps[*receive] == step;
        let receives = (0..plan.receives.len()).filter(due).collect();
        self.flights.push_back(Flight {
            step,
            began,
            values,
            waits_for,
            nodes_left: plan.nodes.len(),
            receives_left: plan.receives.len(),
            sends_left: plan.sends,
        });
        Due { nodes, receives }
    }

    /// Takes the inputs of a node. The last consumer of a value gets the value itself, so that an engine can change it in place.
    /// Constants are clones. Without values, as in a replay, there are none to take.
    pub(super) fn inputs(&mut self, plan: &Plan, step: u64, node: usize, constants: &[Vec<V>]) -> Vec<V> {
        let Some(flight) = self.flight(step) else { return Vec::new() };
        let mut inputs = Vec::with_capacity(plan.nodes[node].inputs.len());
        for source in &plan.nodes[node].inputs {
            inputs.extend(match source {
                Source::Constant(constant, output) => constants[*constant].get(*output).cloned(),
                Source::Value(value) => {
                    let held = &mut flight.values[*value];
                    held.uses -= 1;
                    if held.uses == 0 { held.value.take() } else { held.value.clone() }
                }
            });
        }
        inputs
    }

    /// Notes that a value is there. Calls `ready` with each node that is ready now.
    pub(super) fn put(
        &mut self,
        plan: &Plan,
        step: u64,
        value: usize,
        content: Option<V>,
        mut ready: impl FnMut(u64, usize),
    ) {
        let consumers = &plan.values[value].consumers;
        let Some(flight) = self.flights.iter_mut().find(|flight| flight.step == step) else { return };
        if !consumers.is_empty() {
            flight.values[value].value = content;
        }
        for consumer in consumers {
            flight.waits_for[*consumer] -= 1;
            if flight.waits_for[*consumer] == 0 && self.node_steps[*consumer] == step {
                ready(step, *consumer);
            }
        }
    }

    /// Notes that a node has run. Tells whether it is ready in the next step.
    pub(super) fn ran(&mut self, step: u64, node: usize) -> Option<(u64, usize)> {
        self.flight(step)?.nodes_left -= 1;
        self.node_steps[node] = step + 1;
        let next = self.flight(step + 1)?;
        (next.waits_for[node] == 0).then_some((step + 1, node))
    }

    /// Notes that a receive has arrived. Tells whether it is due in the next step.
    pub(super) fn arrived(&mut self, step: u64, receive: usize) -> bool {
        if let Some(flight) = self.flight(step) {
            flight.receives_left -= 1;
        }
        self.receive_steps[receive] = step + 1;
        self.flight(step + 1).is_some()
    }

    /// Notes that a send has begun.
    pub(super) fn began(&mut self, step: u64) {
        if let Some(flight) = self.flight(step) {
            flight.sends_left -= 1;
        }
    }

    /// Removes the oldest step if it has ended.
    pub(super) fn ended(&mut self) -> Option<Flight<V>> {
        let oldest = self.flights.front()?;
        let left = oldest.nodes_left + oldest.receives_left + oldest.sends_left;
        if left == 0 { self.flights.pop_front() } else { None }
    }

    /// Returns the step that a receive takes next.
    pub(super) fn receive_step(&self, receive: usize) -> u64 {
        self.receive_steps[receive]
    }

    /// Returns the receives of steps in flight that have not arrived, those of old steps first.
    pub(super) fn outstanding(&self) -> Vec<(u64, usize)> {
        let end = self.flights.back().map_or(0, |flight| flight.step + 1);
        let receives = self.receive_steps.iter().enumerate();
        let mut outstanding: Vec<_> =
            receives.filter(|(_, step)| **step < end).map(|(receive, step)| (*step, receive)).collect();
        outstanding.sort_unstable();
        outstanding
    }

    /// Returns the first node, by step and topological order, that has not run. The nodes must have run in this order.
    pub(super) fn first_node(&self) -> Option<(u64, usize)> {
        let flight = self.flights.iter().find(|flight| flight.nodes_left > 0)?;
        let node = self.node_steps.partition_point(|step| *step > flight.step);
        Some((flight.step, node))
    }

    fn flight(&mut self, step: u64) -> Option<&mut Flight<V>> {
        let oldest = self.flights.front()?.step;
        self.flights.get_mut(usize::try_from(step.checked_sub(oldest)?).ok()?)
    }
}

/// What a new step makes ready.
#[derive(Debug)]
pub(super) struct Due {
    pub(super) nodes: Vec<(u64, usize)>,
    pub(super) receives: Vec<usize>,
}
