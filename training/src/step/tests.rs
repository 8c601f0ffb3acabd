//! The graphs of a step, run by executors with transfers within a process, against the same kernels run one
//! after the other.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tonic_rdma_graph::dataflow::Outlet;
use tonic_rdma_graph::schedule::{Program as _, Transfers};
use tonic_rdma_graph::session::Fingerprint;

use super::*;
use crate::data::tests::{samples, texts};
use crate::data::{Data, Samples};
use crate::distributed::process::{Feeder, PartTrainer};

const SEED: u64 = 3;
const RATE: f32 = 0.05;
const MOMENTUM: f32 = 0.5;

fn data(model: Model) -> Arc<Data> {
    Arc::new(match model.reads_texts() {
        false => Data { train: samples(64), test: samples(10) },
        true => Data { train: Samples::Texts(texts(64, 14)), test: Samples::Texts(texts(9, 14)) },
    })
}

fn shape(model: Model, workers: usize, servers: usize) -> JobShape {
    JobShape { model, workers, servers, batch: 9 }
}

fn variables(shape: &JobShape) -> Vec<Arc<Variables>> {
    let (rate, momentum) = if shape.model.reads_texts() { (0.3, 0.9) } else { (RATE, MOMENTUM) };
    let of = |part| Variables::new(shape.variables(part, SEED), rate, momentum, 0).unwrap();
    (0..shape.parts()).map(of).collect()
}

/// Runs steps with an executor for each part. Returns the loss of each step.
fn run(shape: &JobShape, variables: &[Arc<Variables>], steps: std::ops::Range<u64>) -> Vec<f64> {
    let data = data(shape.model);
    let placements = shape.build(0, &variables[0]).unwrap().placements;
    let transfers = Transfers::in_memory(&placements, 1).unwrap();
    let losses: Vec<Vec<f32>> = thread::scope(|scope| {
        let parts: Vec<_> = transfers
            .into_iter()
            .enumerate()
            .map(|(part, transfers): (usize, Transfers<Array>)| {
                let (data, steps, variables) = (Arc::clone(&data), steps.clone(), &variables[part]);
                let work = move || {
                    let graph = shape.build(part, variables).unwrap();
                    let feeder = Feeder::new(data, shape.clone(), SEED, &graph);
                    let deadline = Duration::from_secs(60);
                    let mut trainer = PartTrainer::new(graph, part, transfers, feeder, deadline).unwrap();
                    trainer.run(steps).unwrap().losses
                };
                thread::Builder::new().stack_size(16 << 20).spawn_scoped(scope, work).unwrap()
            })
            .collect();
        parts.into_iter().map(|part| part.join().unwrap()).collect()
    });
    (0..losses[0].len())
        .map(|step| losses.iter().filter_map(|part| part.get(step)).map(|loss| f64::from(*loss)).sum())
        .collect()
}

/// Runs the kernels of all parts one after the other in this thread. Returns the loss of each step.
fn run_in_one_thread(
    shape: &JobShape,
    variables: &[Arc<Variables>],
    steps: std::ops::Range<u64>,
) -> Vec<f64> {
    let data = data(shape.model);
    let mut graphs: Vec<StepGraph> =
        variables.iter().enumerate().map(|(part, variables)| shape.build(part, variables).unwrap()).collect();
    let mut feeder = Feeder::new(data, shape.clone(), SEED, &graphs[0]);
    let graph = Arc::clone(&graphs[0].graph);
    let mut losses = Vec::new();
    for step in steps {
        let mut values: HashMap<Outlet, Array> = HashMap::new();
        for (id, node) in graph.nodes() {
            let inputs: Vec<Array> = node.inputs.iter().map(|input| values[input].clone()).collect();
            let part = graphs[0].placements.partition().part_of(id).unwrap().0;
            let outputs = match graphs[part].kernels.get_mut(&id) {
                Some(kernel) => kernel.run(step, inputs).unwrap(),
                None => vec![feeder.feed(step, id).unwrap()],
            };
            let outlets =
                outputs.into_iter().enumerate().map(|(output, value)| (Outlet { node: id, output }, value));
            values.extend(outlets);
        }
        let loss = |outlet: &Outlet| f64::from(values[outlet].as_floats().unwrap().values()[0]);
        losses.push(graph.results().iter().map(loss).sum());
    }
    losses
}

fn settled(variables: &[Arc<Variables>], version: u64) -> Vec<String> {
    variables
        .iter()
        .map(|variables| {
            variables.settle(version).unwrap();
            format!("{:016x}", variables.hash().unwrap())
        })
        .collect()
}

fn large_stack(work: impl FnOnce() + Send + 'static) {
    thread::Builder::new().stack_size(16 << 20).spawn(work).unwrap().join().unwrap();
}

#[test]
fn executors_give_the_bits_of_one_thread() {
    large_stack(|| {
        for (model, workers, servers, steps) in [
            (Model::Mlp, 1, 1, 2),
            (Model::Mlp, 3, 1, 4),
            (Model::Mlp, 1, 6, 2),
            (Model::Mlp, 4, 2, 3),
            (Model::Cnn, 2, 3, 3),
            (Model::Lstm, 2, 1, 5),
            (Model::Lstm, 3, 4, 5),
        ] {
            let shape = shape(model, workers, servers);
            let (split, single) = (variables(&shape), variables(&shape));
            let losses = run(&shape, &split, 0..steps);
            assert_eq!(losses, run_in_one_thread(&shape, &single, 0..steps), "{shape:?}");
            assert_eq!(losses.len() as u64, steps);
            assert!(losses.iter().all(|loss| loss.is_finite() && *loss > 0.0), "{losses:?}");
            assert!(
                losses.windows(2).all(|pair| pair[0] != pair[1]),
                "each step changes the weights: {losses:?}"
            );
            let (split, single) = (settled(&split, steps), settled(&single, steps));
            assert_eq!(split, single, "{shape:?}");
        }
    });
}

#[test]
fn servers_have_the_variables_in_turn_and_change_no_bit() {
    let [one, two, four] = [1, 2, 4].map(|servers| shape(Model::Mlp, 2, servers));
    let names = |shape: &JobShape, part| -> Vec<String> {
        shape.variables(part, SEED).into_iter().map(|variable| variable.name).collect()
    };
    assert_eq!(names(&two, 2), ["weight.0", "weight.1", "weight.2"]);
    assert_eq!(names(&two, 3), ["bias.0", "bias.1", "bias.2"]);
    assert_eq!(names(&four, 2), ["weight.0", "weight.2"]);
    assert_eq!(names(&four, 5), ["bias.1"]);
    assert!(names(&two, 0).is_empty(), "a worker keeps none");
    assert_eq!((one.name(2).as_str(), four.name(5).as_str()), ("the parameter server", "parameter server 3"));
    let losses = [&one, &two, &four].map(|shape| run_in_one_thread(shape, &variables(shape), 0..3));
    assert!(losses[0].len() == 3 && losses.iter().all(|each| *each == losses[0]), "{losses:?}");
}

#[test]
fn the_steps_are_those_of_a_training_with_one_worker() {
    for model in [Model::Mlp, Model::Cnn] {
        let shape = shape(model, 2, 1);
        let split = variables(&shape);
        let losses = run(&shape, &split, 0..3);
        let one = JobShape { workers: 1, ..shape.clone() };
        let whole = variables(&one);
        for (step, (loss, expected)) in losses.iter().zip(run_in_one_thread(&one, &whole, 0..3)).enumerate() {
            assert!((loss - expected).abs() < 1e-4 * expected, "step {step}: {loss} {expected}");
        }
        settled(&split, 3);
        settled(&whole, 3);
        for ((name, found), (_, expected)) in
            split[2].values().unwrap().iter().zip(whole[1].values().unwrap())
        {
            for (one, other) in expected.values().iter().zip(found.values()) {
                assert!((one - other).abs() < 1e-5 + 1e-3 * one.abs(), "{name}: {one} {other}");
            }
        }
    }
}

#[test]
fn the_recurrent_network_learns_and_its_lengths_cross_with_shapes_that_vary() {
    large_stack(|| {
        let shape = shape(Model::Lstm, 2, 1);
        let split = variables(&shape);
        let graph = shape.build(0, &split[0]).unwrap();
        let dynamic: Vec<&str> = graph
            .placements
            .crossings()
            .iter()
            .filter(|crossing| !crossing.placement.is_static())
            .map(|crossing| crossing.name.as_str())
            .collect();
        // For each worker: the characters, their rows, and the gradients of the rows.
        assert_eq!(dynamic.len(), 6, "{dynamic:?}");
        assert!(dynamic.contains(&"clip.embedding@1 to part 2"), "{dynamic:?}");
        let losses = run(&shape, &split, 0..60);
        assert!(losses[59] < losses[0] / 2.0, "{losses:?}");
        settled(&split, 60);
        let data = data(shape.model);
        let (values, tested) = (split[2].values().unwrap(), data.test.len());
        let [loss, correct, number] = shape.model.test(&values, &data.test, 0..tested).unwrap();
        assert!(loss / number < losses[0] / 2.0 && correct / number > 0.5, "{loss} {correct} {number}");
    });
}

#[test]
fn a_job_goes_on_with_fewer_workers_from_the_last_complete_step() {
    let before = shape(Model::Mlp, 3, 2);
    let after = JobShape { workers: 2, ..before.clone() };
    let without_1 = |parts: &[Arc<Variables>]| -> Vec<Arc<Variables>> {
        [0, 2, 3, 4].iter().filter_map(|part| parts.get(*part).cloned()).collect()
    };
    // The job that loses worker 1 in step 3.
    let parts = variables(&before);
    run(&before, &parts, 0..3);
    let kept = without_1(&parts);
    // One server has the values of step 3 already.
    kept[2].assign("weight.0", 3).unwrap();
    let complete: Vec<u64> = kept.iter().skip(2).map(|variables| variables.complete().unwrap()).collect();
    assert_eq!(complete, [3, 3]);
    for variables in &kept[2..] {
        variables.settle(3).unwrap();
    }
    let losses = run(&after, &kept, 3..6);
    // A job that was planned so.
    let planned = variables(&before);
    run_in_one_thread(&before, &planned, 0..3);
    settled(&planned, 3);
    let planned = without_1(&planned);
    assert_eq!(losses, run_in_one_thread(&after, &planned, 3..6));
    assert_eq!(settled(&kept, 6), settled(&planned, 6));
}

#[test]
fn each_part_numbers_the_graph_alike() {
    let shape = shape(Model::Lstm, 3, 2);
    let variables = variables(&shape);
    let fingerprint = |part: usize| {
        let built = shape.build(part, &variables[part]).unwrap();
        Fingerprint::new(&built.graph, &built.placements)
    };
    let all: Vec<Fingerprint> = (0..shape.parts()).map(fingerprint).collect();
    assert!(all.iter().all(|each| *each == all[0]), "{all:?}");
}
