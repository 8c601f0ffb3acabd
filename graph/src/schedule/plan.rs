//! What one part runs in each step: its nodes, where their inputs come from, and where their outputs go; and
//! the steps in flight.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use crate::dataflow::{Node, NodeId, Outlet, Role, Topology};
use crate::error::GraphError;
use crate::placement::{Crossing, CrossingId, Part, Placements};

/// The work of one part in a step.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// The nodes of this part but constants, in topological order.
    pub(super) nodes: Vec<PlannedNode>,
    /// The crossing tensors that arrive.
    pub(super) receives: Vec<PlannedReceive>,
    /// The values of a step: the outputs of the nodes, and the tensors that arrive.
    pub(super) values: Vec<PlannedValue>,
    /// The constants that this part uses.
    pub(super) constants: Vec<NodeId>,
    /// The results that are constants: their position in `constants`, and the output.
    pub(super) constant_results: Vec<(usize, Outlet)>,
    /// The number of sends in a step.
    pub(super) sends: usize,
}

/// A node of this part.
#[derive(Debug)]
pub(super) struct PlannedNode {
    pub(super) id: NodeId,
    pub(super) name: String,
    pub(super) kind: String,
    /// Whether the program feeds the output.
    pub(super) is_input: bool,
    pub(super) inputs: Vec<Source>,
    /// The number of inputs that are values of the step.
    pub(super) waits_for: usize,
    /// The value of the first output. The others follow.
    pub(super) first_value: usize,
    pub(super) outputs: usize,
    /// The crossing tensors that leave, with the output.
    pub(super) sends: Vec<(usize, CrossingId)>,
    /// The results of the step, with the output.
    pub(super) results: Vec<(usize, Outlet)>,
}

/// A crossing tensor that arrives.
#[derive(Debug)]
pub(super) struct PlannedReceive {
    pub(super) crossing: CrossingId,
    pub(super) value: usize,
}

/// A value of a step.
#[derive(Debug, Default)]
pub(super) struct PlannedValue {
    /// The node inputs that use it: a node that uses it twice is here twice.
    pub(super) consumers: Vec<usize>,
    /// If it arrives: its position among the receives.
    pub(super) receive: Option<usize>,
}

/// Where an input comes from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    Value(usize),
    /// A constant, by its position in [`Plan::constants`], and the output.
    Constant(usize, usize),
}

impl Plan {
    pub(super) fn new(graph: &Topology, placements: &Placements, part: Part) -> Result<Self, GraphError> {
        let (parts, crossings) = (placements.partition().parts(), placements.crossings());
        if parts.len() != graph.len() {
            let reason =
                format!("are those of a graph of {} nodes, and this graph has {}", parts.len(), graph.len());
            return Err(GraphError::of_setting("placements", reason));
        }
        let mut planner = Planner::new(graph, crossings, part)?;
        for (id, node) in graph.nodes().filter(|(_, node)| node.role != Role::Constant) {
            if parts[id.0] == part {
                planner.add(id, node)?;
            }
        }
        planner.results(parts);
        planner.check()?;
        Ok(planner.plan)
    }
}

struct Planner<'a> {
    graph: &'a Topology,
    crossings: &'a [Crossing],
    part: Part,
    plan: Plan,
    values: HashMap<Outlet, usize>,
    constants: HashMap<NodeId, usize>,
    sends: HashMap<Outlet, Vec<CrossingId>>,
}

impl<'a> Planner<'a> {
    fn new(graph: &'a Topology, crossings: &'a [Crossing], part: Part) -> Result<Self, GraphError> {
        let (values, constants, sends) = (HashMap::new(), HashMap::new(), HashMap::new());
        let mut planner = Self { graph, crossings, part, plan: Plan::default(), values, constants, sends };
        for crossing in crossings {
            planner.cross(crossing)?;
        }
        Ok(planner)
    }

    fn cross(&mut self, crossing: &Crossing) -> Result<(), GraphError> {
        if crossing.from == self.part {
            self.sends.entry(crossing.outlet).or_default().push(crossing.id);
            self.plan.sends += 1;
        }
        if crossing.to == self.part {
            let (value, receive) = (self.plan.values.len(), self.plan.receives.len());
            if crossing.from == self.part || self.values.insert(crossing.outlet, value).is_some() {
                let node = self.graph.outlet_name(crossing.outlet);
                let reason =
                    format!("crosses more than once to part {}, or from this part to itself", self.part.0);
                return Err(GraphError::of_node(node, reason));
            }
            self.plan.values.push(PlannedValue { consumers: Vec::new(), receive: Some(receive) });
            self.plan.receives.push(PlannedReceive { crossing: crossing.id, value });
        }
        Ok(())
    }

    fn add(&mut self, id: NodeId, node: &Node) -> Result<(), GraphError> {
        let index = self.plan.nodes.len();
        let mut inputs = Vec::with_capacity(node.inputs.len());
        let mut waits_for = 0;
        for input in &node.inputs {
            let source = self.source(node, *input)?;
            if let Source::Value(value) = source {
                self.plan.values[value].consumers.push(index);
                waits_for += 1;
            }
            inputs.push(source);
        }
        let first_value = self.plan.values.len();
        let mut sends = Vec::new();
        for output in 0..node.outputs.len() {
            let outlet = Outlet { node: id, output };
            self.values.insert(outlet, first_value + output);
            self.plan.values.push(PlannedValue::default());
            let crossings = self.sends.remove(&outlet).unwrap_or_default();
            sends.extend(crossings.into_iter().map(|crossing| (output, crossing)));
        }
        self.plan.nodes.push(PlannedNode {
            id,
            name: node.name.clone(),
            kind: node.kind.clone(),
            is_input: node.role == Role::Input,
            inputs,
            waits_for,
            first_value,
            outputs: node.outputs.len(),
            sends,
            results: Vec::new(),
        });
        Ok(())
    }

    fn source(&mut self, node: &Node, input: Outlet) -> Result<Source, GraphError> {
        if self.graph.node(input.node).is_some_and(|node| node.role == Role::Constant) {
            return Ok(Source::Constant(self.constant(input.node), input.output));
        }
        self.values.get(&input).map(|value| Source::Value(*value)).ok_or_else(|| {
            let (name, part) = (self.graph.outlet_name(input), self.part);
            let reason = format!(
                "its input {name} is computed in another part, and no crossing tensor brings it to part {part}"
            );
            GraphError::of_node(&node.name, reason)
        })
    }

    fn constant(&mut self, node: NodeId) -> usize {
        let constants = &mut self.plan.constants;
        *self.constants.entry(node).or_insert_with(|| {
            constants.push(node);
            constants.len() - 1
        })
    }

    fn results(&mut self, parts: &[Part]) {
        let here = |outlet: &&Outlet| parts[outlet.node.0] == self.part;
        let results: Vec<Outlet> = self.graph.results().iter().filter(here).copied().collect();
        for outlet in results {
            match self.plan.nodes.binary_search_by_key(&outlet.node, |node| node.id) {
                Ok(index) => self.plan.nodes[index].results.push((outlet.output, outlet)),
                Err(_) => {
                    let constant = self.constant(outlet.node);
                    self.plan.constant_results.push((constant, outlet));
                }
            }
        }
    }

    /// Checks that each crossing tensor that leaves is an output of a node of this part, and that each one
    /// that arrives is used.
    fn check(&self) -> Result<(), GraphError> {
        if let Some(outlet) = self.sends.keys().min() {
            let node = self.graph.outlet_name(*outlet);
            let reason =
                format!("crosses from part {}, and is no output of a node of that part", self.part.0);
            return Err(GraphError::of_node(node, reason));
        }
        let unused = |receive: &&PlannedReceive| self.plan.values[receive.value].consumers.is_empty();
        match self.plan.receives.iter().find(unused) {
            None => Ok(()),
            Some(receive) => {
                let reason = format!("crosses to part {}, which does not use it", self.part.0);
                Err(GraphError::of_node(&self.crossings[receive.crossing.0].name, reason))
            }
        }
    }
}

/// The steps in flight, the oldest first.
///
/// Nodes, receives and sends each see the steps in ascending order, so the oldest step ends first.
#[derive(Debug)]
pub(super) struct Flights<V> {
    pub(super) flights: VecDeque<Flight<V>>,
    /// The step that each node runs next.
    node_steps: Vec<u64>,
    /// The step that each receive takes next.
    pub(super) receive_steps: Vec<u64>,
}

/// A step in flight.
#[derive(Debug)]
pub(super) struct Flight<V> {
    pub(super) step: u64,
    pub(super) began: Duration,
    values: Vec<StepValue<V>>,
    /// The number of inputs that each node waits for.
    waits_for: Vec<usize>,
    nodes_left: usize,
    receives_left: usize,
    sends_left: usize,
    /// The life of the step, for subscribers of `tracing`.
    _span: tracing::Span,
}

#[derive(Debug)]
struct StepValue<V> {
    value: Option<V>,
    /// The number of inputs that are still to use it.
    uses: usize,
}

impl<V: Clone> Flights<V> {
    /// Makes a list without steps. The first step will be `first`.
    pub(super) fn new(plan: &Plan, first: u64) -> Self {
        Self {
            flights: VecDeque::new(),
            node_steps: vec![first; plan.nodes.len()],
            receive_steps: vec![first; plan.receives.len()],
        }
    }

    /// Adds the next step. Returns which nodes are ready, and which receives are now due.
    pub(super) fn admit(&mut self, plan: &Plan, step: u64, began: Duration) -> (Vec<usize>, Vec<usize>) {
        let values =
            plan.values.iter().map(|value| StepValue { value: None, uses: value.consumers.len() }).collect();
        let waits_for: Vec<usize> = plan.nodes.iter().map(|node| node.waits_for).collect();
        let runs = |(node, waits_for): (usize, &usize)| *waits_for == 0 && self.node_steps[node] == step;
        let nodes = waits_for.iter().enumerate().filter(|it| runs(*it)).map(|(node, _)| node).collect();
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
            _span: tracing::debug_span!(
                "graph_step",
                step,
                receives = plan.receives.len(),
                sends = plan.sends
            ),
        });
        (nodes, receives)
    }

    /// Takes the inputs of a node. The last consumer of a value gets the value itself, so that an engine can
    /// change it in place. Constants are clones. A replay has no values, so it takes none.
    pub(super) fn inputs(&mut self, plan: &Plan, step: u64, node: usize, constants: &[Vec<V>]) -> Vec<V> {
        let Some(flight) = self.flight(step) else { return Vec::new() };
        let mut inputs = Vec::with_capacity(plan.nodes[node].inputs.len());
        for source in &plan.nodes[node].inputs {
            inputs.extend(match source {
                Source::Constant(constant, output) => constants[*constant].get(*output).cloned(),
                Source::Value(value) => {
                    let input = &mut flight.values[*value];
                    input.uses -= 1;
                    if input.uses == 0 { input.value.take() } else { input.value.clone() }
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

    /// Notes that a node has run. Returns the next step with this node if the node is ready in it.
    pub(super) fn ran(&mut self, step: u64, node: usize) -> Option<(u64, usize)> {
        self.flight(step)?.nodes_left -= 1;
        self.node_steps[node] = step + 1;
        let next = self.flight(step + 1)?;
        (next.waits_for[node] == 0).then_some((step + 1, node))
    }

    /// Notes that a receive has arrived. Returns whether it is due in the next step.
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

    /// Returns the receives of steps in flight that have not arrived, those of old steps first.
    pub(super) fn outstanding(&self) -> Vec<(u64, usize)> {
        let end = self.flights.back().map_or(0, |flight| flight.step + 1);
        let receives = self.receive_steps.iter().enumerate();
        let mut outstanding: Vec<_> =
            receives.filter(|(_, step)| **step < end).map(|(receive, step)| (*step, receive)).collect();
        outstanding.sort_unstable();
        outstanding
    }

    /// Returns the first node, by step and topological order, that has not run. The nodes must have run in
    /// this order.
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
