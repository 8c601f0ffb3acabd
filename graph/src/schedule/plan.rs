//! What one part runs in each step: its nodes, where their inputs come from, and where their outputs go.

use std::collections::HashMap;

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
    /// The results that are constants: their place in `constants`, and the output.
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
    /// The node inputs that use it: a node that uses it twice stands here twice.
    pub(super) consumers: Vec<usize>,
    /// If it arrives: its place among the receives.
    pub(super) receive: Option<usize>,
}

/// Where an input comes from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    Value(usize),
    /// A constant, by its place in [`Plan::constants`], and the output.
    Constant(usize, usize),
}

impl Plan {
    pub(super) fn new(graph: &Topology, placements: &Placements, part: Part) -> Result<Self, GraphError> {
        let (parts, crossings) = (placements.partition().parts(), placements.crossings());
        if parts.len() != graph.len() {
            let reason =
                format!("are those of a graph of {} nodes, and this graph has {}", parts.len(), graph.len());
            return Err(GraphError::Setting { setting: "placements", reason });
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
                return Err(GraphError::Node { node, reason });
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
        self.values.get(&input).map(|value| Source::Value(*value)).ok_or_else(|| GraphError::Node {
            node: node.name.clone(),
            reason: format!(
                "its input {} is computed in another part, and no crossing tensor brings it to part {}",
                self.graph.outlet_name(input),
                self.part.0
            ),
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

    /// Checks that each crossing tensor that leaves is an output of a node of this part, and that each one that arrives is used.
    fn check(&self) -> Result<(), GraphError> {
        if let Some(outlet) = self.sends.keys().min() {
            let node = self.graph.outlet_name(*outlet);
            let reason =
                format!("crosses from part {}, and is no output of a node of that part", self.part.0);
            return Err(GraphError::Node { node, reason });
        }
        let unused = |receive: &&PlannedReceive| self.plan.values[receive.value].consumers.is_empty();
        match self.plan.receives.iter().find(unused) {
            None => Ok(()),
            Some(receive) => {
                let node = self.crossings[receive.crossing.0].name.clone();
                Err(GraphError::Node {
                    node,
                    reason: format!("crosses to part {}, which does not use it", self.part.0),
                })
            }
        }
    }
}
