//! "Tensors without RPC": a parameter server and its worker.

use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};

use super::addresses::{self, RdmaDevice};
use super::put::{byte, check};
use super::running::{self, Outcome, ROUNDS, default_runtime};
use super::two_lines::polling_runtime;

#[test]
fn in_the_default_runtime() {
    running::run(default_runtime(), a_thousand_tensors(default_runtime()));
}

#[test]
fn in_a_runtime_that_polls_when_idle() {
    running::run(polling_runtime().unwrap(), a_thousand_tensors(polling_runtime().unwrap()));
}

async fn a_thousand_tensors(servers: Runtime) -> Outcome {
    let (offered, attach) = oneshot::channel();
    let server = running::apart(servers, parameter_server(offered));
    attach.await?;
    worker().await?;
    server.await?
}

#[allow(unused_variables, reason = "the book leaves to its reader what becomes of the bytes")]
#[rustfmt::skip]
async fn parameter_server(offered: oneshot::Sender<()>) -> Outcome {
    // parameter server: a place for worker 0's gradients
    let device = RdmaDevice::builder().bind("0.0.0.0:50052").await?;
    let spec = TensorSpec::new(Dtype::F32, Shape::new(&[1024, 1000])?)?;
    let mut gradients = device.static_receiver("worker0/fc8", &spec, 1)?;

    let _ = offered.send(());
    let mut bytes = vec![0; 4 * 1024 * 1000];
    for round in 0..ROUNDS {
        // for each tensor
        let arrived = gradients.recv().await?;                                         // or try_recv(): one load
        arrived.for_each_chunk(|bytes| { /* apply */ });                               // dropping it frees the place
        arrived.copy_to(&mut bytes)?;
        check(&bytes, round);
    }
    Ok(())
}

#[rustfmt::skip]
async fn worker() -> Outcome {
    let spec = TensorSpec::new(Dtype::F32, Shape::new(&[1024, 1000])?)?;
    addresses::ready("ps0:50052").await;
    // worker
    let device = RdmaDevice::builder().bind("0.0.0.0:0").await?;
    let mut fc8 = device.channel("ps0:50052", 0).await?.static_sender("worker0/fc8", &spec).await?;
    let mut region = device.allocate(4 * 1024 * 1000)?;                            // fill it: &mut [u8]
    region.fill(byte(0));
    let mut kept = Some(region);
    for round in 0..ROUNDS {
        let mut region = kept.take().unwrap();
        region.fill(byte(round));
        let region = fc8.send_region(region).await?;                                   // comes back when it is there
        kept = Some(region);
    }
    fc8.flush().await?;
    Ok(())
}
