//! The parameter server: it keeps all variables, and adds the gradients of the workers up in their order.

use std::collections::HashMap;

use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::Outlet;

use super::builder::Builder;
use super::gradient::{WorkerGradient, gradient_of};
use super::shape::Shape;

/// Adds all nodes of a step.
pub(super) fn add(builder: &mut Builder, shape: &Shape) -> Result<(), GraphError> {
    let server = shape.workers;
    let shapes = shape.shapes();
    let mut values: HashMap<String, Outlet> = HashMap::new();
    for (name, dims) in &shapes {
        values.insert(name.clone(), builder.assign(server, "", name, dims)?);
    }
    // The gradients of all workers for each variable.
    let mut gradients: Vec<(String, Vec<WorkerGradient>)> = Vec::new();
    for worker in 0..shape.workers {
        for (name, gradient) in shape.add_worker(builder, worker, &values)? {
            match gradients.iter_mut().find(|(known, _)| *known == name) {
                Some((_, workers)) => workers.push(gradient),
                None => gradients.push((name, vec![gradient])),
            }
        }
    }
    for (name, workers) in gradients {
        let inputs = workers.iter().flat_map(|gradient| gradient.outlets()).collect();
        builder.push(server, "", &name, inputs, move |arrays| gradient_of(&workers, arrays))?;
    }
    Ok(())
}
