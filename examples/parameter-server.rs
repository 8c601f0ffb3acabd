//! A parameter server that trains. The server holds the weights of a linear regression. Each worker is a
//! process with its own data: it pulls the weights, computes a gradient, and pushes the gradient. Weights and
//! gradients move through static slots: one RDMA write each, and no RPC.
//!
//! `cargo run --example parameter-server` runs the server, which starts the workers.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tonic_rdma::memory::Pool;
use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, StaticReceiver, StaticSender, TensorMut, TensorSpec};

const WORKERS: usize = 3;
const FEATURES: usize = 16;
const SAMPLES: usize = 256;
const STEPS: usize = 200;
const RATE: f32 = 0.05;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.as_slice() {
        [_, server, worker] => work(server, worker.parse()?).await,
        _ => serve().await,
    }
}

/// Runs the server. In each step it sends the weights to all workers, and moves the weights along the mean of
/// the gradients.
async fn serve() -> Result<()> {
    let device = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    let (mut children, mut weights_to, mut gradients_from) = (Vec::new(), Vec::new(), Vec::new());
    for worker in 0..WORKERS {
        let name = format!("gradient of {worker}");
        gradients_from.push(device.static_receiver(&name, &spec(FEATURES + 2)?, 1)?);
        let (child, endpoint) = start(&device.endpoint(), worker).await?;
        let channel = device.channel(&endpoint, 0).await?;
        weights_to.push(channel.static_sender("weights", &spec(FEATURES + 1)?).await?);
        children.push(child);
    }

    let pool = Pool::for_sending(1 << 20);
    let mut weights = vec![0.0; FEATURES + 1];
    for step in 0..STEPS {
        for sender in &mut weights_to {
            send(sender, &pool, &weights).await?;
        }
        let mut loss = 0.0;
        for receiver in &mut gradients_from {
            let gradient = receive(receiver).await?;
            loss += gradient[FEATURES + 1] / WORKERS as f32;
            for (weight, slope) in weights.iter_mut().zip(&gradient) {
                *weight -= RATE / WORKERS as f32 * slope;
            }
        }
        if step % 40 == 0 || step + 1 == STEPS {
            println!("step {step}: loss {loss:.6}");
        }
    }
    for child in &mut children {
        let status = child.wait().await?;
        if !status.success() {
            return Err(format!("a worker ended with {status}").into());
        }
    }
    let off = |(found, wanted): (&f32, f32)| (found - wanted).abs() > 0.01;
    if weights.iter().zip(truth()).any(off) {
        return Err("the weights are not those that the data were made with".into());
    }
    println!("{WORKERS} workers found all weights to within 0.01");
    Ok(())
}

/// Starts a worker. The worker prints the address of its device once its slot for the weights exists.
async fn start(server: &str, worker: usize) -> Result<(Child, String)> {
    let mut program = Command::new(std::env::current_exe()?);
    program.args([server, &worker.to_string()]).stdout(Stdio::piped()).kill_on_drop(true);
    let mut child = program.spawn()?;
    let stdout = child.stdout.take().ok_or("the worker has no stdout")?;
    let endpoint =
        BufReader::new(stdout).lines().next_line().await?.ok_or("the worker printed no address")?;
    Ok((child, endpoint))
}

/// Runs a worker. It answers the weights with the gradient on its own data.
async fn work(server: &str, worker: usize) -> Result<()> {
    let device = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    let mut weights = device.static_receiver("weights", &spec(FEATURES + 1)?, 1)?;
    let channel = device.channel(server, 0).await?;
    let mut to_server = channel.static_sender(&format!("gradient of {worker}"), &spec(FEATURES + 2)?).await?;
    println!("{}", device.endpoint());

    let (pool, samples) = (Pool::for_sending(1 << 20), samples(worker));
    for _ in 0..STEPS {
        let weights = receive(&mut weights).await?;
        send(&mut to_server, &pool, &gradient(&weights, &samples)).await?;
    }
    // Waits until the server has taken the last gradient.
    Ok(to_server.flush().await?)
}

/// Sends the values from registered memory, without a copy on the way.
async fn send(sender: &mut StaticSender, pool: &Pool, values: &[f32]) -> Result<()> {
    let mut tensor = TensorMut::in_pool(*sender.spec(), pool)?;
    tensor.as_mut_slice::<f32>()?.copy_from_slice(values);
    Ok(sender.send(&tensor.freeze()).await?)
}

/// Copies a tensor that has arrived out of the slot. The slot is then free again.
async fn receive(receiver: &mut StaticReceiver) -> Result<Vec<f32>> {
    let tensor = receiver.recv().await?.to_tensor()?;
    Ok(tensor.as_slice::<f32>()?.to_vec())
}

/// Returns the spec of `elements` floats. The weights are one for each feature, and a bias. A gradient is one
/// slope for each weight, and the loss.
fn spec(elements: usize) -> Result<TensorSpec> {
    Ok(TensorSpec::new(Dtype::F32, Shape::new(&[elements as u64])?)?)
}

/// Returns the mean gradient of the squared error, and the mean squared error.
fn gradient(weights: &[f32], samples: &[(Vec<f32>, f32)]) -> Vec<f32> {
    let mut gradient = vec![0.0; FEATURES + 2];
    for (features, wanted) in samples {
        let error = predict(weights, features) - wanted;
        for (slope, feature) in gradient.iter_mut().zip(features.iter().chain([&1.0])) {
            *slope += 2.0 * error * feature / SAMPLES as f32;
        }
        gradient[FEATURES + 1] += error * error / SAMPLES as f32;
    }
    gradient
}

fn predict(weights: &[f32], features: &[f32]) -> f32 {
    features.iter().chain([&1.0]).zip(weights).map(|(feature, weight)| feature * weight).sum()
}

/// Returns the weights that the data were made with.
fn truth() -> Vec<f32> {
    (0..=FEATURES).map(|index| (index as f32 * 0.7).sin()).collect()
}

fn samples(worker: usize) -> Vec<(Vec<f32>, f32)> {
    let value = |index: usize| ((index * index * 7919 + worker * 104_729) as f32).sin();
    let features = |sample| (0..FEATURES).map(|at| value(sample * FEATURES + at)).collect::<Vec<_>>();
    (0..SAMPLES).map(features).map(|features| (features.clone(), predict(&truth(), &features))).collect()
}
