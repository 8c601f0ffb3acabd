//! The other process: this binary, started again, which serves until its standard input ends.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tonic_rdma_commands::clap::{self, ValueEnum};
use tonic_rdma_commands::process::{self, Child};
use tonic_rdma_commands::{Flavour, Named as _, cores, parse_name};
use tonic_rdma_tensor::{
    BlockCopy, Channel, Dtype, MemRegion, Offer, RdmaDevice, Rights, Shape, TensorMut, TensorSpec,
};

/// First argument of the other process.
pub(crate) const ARGUMENT: &str = "peer";
/// The longest time for the other process to start, or to end.
const LIMIT: Duration = Duration::from_secs(60);

/// The role of the other process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    /// Receives tensors from a static slot by polling.
    Static,
    /// Receives tensors from a static slot by `recv().await`.
    StaticAsync,
    /// Receives tensors from a static slot of two buffers by `recv().await`.
    StaticOfTwo,
    /// Receives tensors from a dynamic slot.
    Dynamic,
    /// Offers tensors, some steps ahead.
    Provider,
    /// Exports a region.
    Region,
    /// Exports a region, waits for notices there, and answers each with a notice in a region of the caller.
    Notice,
}

/// Returns the spec of a tensor of this many bytes.
pub(crate) fn bytes(length: u64) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[length]).unwrap()).unwrap()
}

/// Pauses between two looks at memory.
pub(crate) fn relax() {
    std::hint::spin_loop();
}

/// Builds a runtime. One that polls when idle gets a core of its own, if there are two; the others run as in a program that pins nothing.
fn runtime(flavour: Flavour, index: usize) -> Runtime {
    if flavour == Flavour::IdlePolling {
        let allowed = cores::allowed();
        let _ = cores::pin(allowed[index % allowed.len()]);
    }
    flavour.build().unwrap()
}

/// A handle to the other process, with a channel to it. The drop ends the process.
pub(crate) struct Peer {
    process: Child,
    device: RdmaDevice,
    channel: Channel,
    runtime: Runtime,
}

impl Peer {
    /// Starts the other process. Both processes have a runtime of this flavour.
    pub(crate) fn start(role: Role, length: u64, flavour: Flavour) -> Self {
        static CORES: LazyLock<Vec<usize>> = LazyLock::new(cores::allowed);
        // The other process inherits the cores of this thread, and the last bench may have pinned it.
        let _ = cores::pin_to(&CORES);
        let mut command = process::again().unwrap();
        command.args([ARGUMENT, role.name(), &length.to_string(), &flavour.to_string()]);
        let (process, endpoint) = Child::ready("the other process", command, LIMIT).unwrap();
        let runtime = runtime(flavour, 0);
        let (device, channel) = runtime.block_on(async {
            let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
            let channel = device.channel(&endpoint, 0).await.unwrap();
            (device, channel)
        });
        Self { process, device, channel, runtime }
    }

    pub(crate) fn channel(&self) -> &Channel {
        &self.channel
    }

    pub(crate) fn device(&self) -> &RdmaDevice {
        &self.device
    }

    /// Tells the other process the endpoint of this one.
    pub(crate) fn send_endpoint(&mut self) {
        self.process.send_line(self.device.endpoint());
    }

    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Returns a region of this process, already touched.
    pub(crate) fn region(&self, length: u64) -> MemRegion {
        let mut region = self.device.allocate(length as usize).unwrap();
        region.fill(1);
        region
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.process.end(LIMIT);
    }
}

/// Runs the other process.
pub(crate) fn run(arguments: &[String]) {
    let [role, length, flavour] = arguments else { panic!("peer ROLE LENGTH RUNTIME, not {arguments:?}") };
    let role = parse_name("role", role).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (ending, ended) = tokio::sync::oneshot::channel();
    let (sender, lines) = unbounded_channel();
    let stopping = Arc::clone(&stop);
    let closed = move || {
        stopping.store(true, Ordering::Relaxed);
        let _ = ending.send(());
    };
    process::on_stdin(move |line| drop(sender.send(line)), closed).unwrap();
    runtime(Flavour::parse(flavour).unwrap(), 1).block_on(async {
        tokio::select! {
            () = serve(role, length.parse().expect("a length"), &stop, lines) => {}
            _ = ended => {}
        }
    });
}

async fn serve(role: Role, length: u64, stop: &AtomicBool, mut lines: UnboundedReceiver<String>) {
    let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
    let ready = || process::report_line(device.endpoint()).unwrap();
    let running = || !stop.load(Ordering::Relaxed);
    let export = || {
        let memory = device.allocate(length as usize).unwrap();
        device.export("region", memory, Rights::READ_WRITE).unwrap()
    };
    match role {
        Role::Static => {
            let mut receiver = device.static_receiver("slot", &bytes(length), 1).unwrap();
            ready();
            drop(receiver.recv().await.unwrap());
            let mut looks = 0_u32;
            while running() {
                match receiver.try_recv() {
                    Ok(Some(_)) => continue,
                    Ok(None) => {}
                    Err(error) => panic!("{error}"),
                }
                relax();
                looks += 1;
                if looks.is_multiple_of(1 << 20) {
                    tokio::task::yield_now().await;
                }
            }
        }
        Role::StaticAsync | Role::StaticOfTwo => {
            let depth = if role == Role::StaticOfTwo { 2 } else { 1 };
            let mut receiver = device.static_receiver("slot", &bytes(length), depth).unwrap();
            ready();
            while running() && receiver.recv().await.is_ok() {}
        }
        Role::Dynamic => {
            let mut receiver = device.dynamic_receiver("slot", 1).unwrap();
            ready();
            while running() && receiver.recv().await.is_ok() {}
        }
        Role::Provider => {
            let pool = tonic_rdma::memory::Pool::for_sending(2 * length.max(1 << 20));
            let mut tensor = TensorMut::in_pool(bytes(length), &pool).unwrap();
            tensor.bytes_mut().fill(1);
            let tensor = tensor.freeze();
            ready();
            let mut step = 0;
            while running() {
                while device.held().offers < 64 {
                    device.put("tensor", step, Offer::Tensor(tensor.clone()), 1).unwrap();
                    step += 1;
                }
                tokio::task::yield_now().await;
            }
        }
        Role::Region => {
            let _region = export();
            ready();
            std::future::pending::<()>().await;
        }
        Role::Notice => {
            let region = export();
            ready();
            let Some(caller) = lines.recv().await else { return };
            let channel = device.channel(&caller, 0).await.unwrap();
            let remote = channel.region("answers").await.unwrap();
            let mut answer = device.allocate(8).unwrap();
            let block = [BlockCopy { local: 0, remote: 0, length: 8 }];
            // The first answer shows that this process has attached to the caller's region.
            while let Ok(sent) = channel.write(&remote).notify(true).blocks_from(answer, &block).await {
                answer = sent;
                if region.notice().await.is_err() {
                    return;
                }
            }
        }
    }
}
