//! The other process: this binary once more, which serves until its standard input ends.

use std::future::Future;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tonic_rdma::runtime::idle_polling;
use tonic_rdma_tensor::{Channel, Dtype, MemRegion, Offer, RdmaDevice, Rights, Shape, TensorMut, TensorSpec};

/// First argument of the other process.
pub(crate) const ARGUMENT: &str = "peer";

/// What it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Takes tensors out of a static slot, by polling.
    Static,
    /// The same by `recv().await`.
    StaticAsync,
    /// Reads tensors that a dynamic slot tells of.
    Dynamic,
    /// Offers tensors, a few steps ahead.
    Provider,
    /// Has a region.
    Region,
}

const ROLES: [(Role, &str); 5] = [
    (Role::Static, "static"),
    (Role::StaticAsync, "static-async"),
    (Role::Dynamic, "dynamic"),
    (Role::Provider, "provider"),
    (Role::Region, "region"),
];

/// A tensor of so many bytes.
pub(crate) fn bytes(length: u64) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[length]).unwrap()).unwrap()
}

/// Between two looks at memory.
pub(crate) fn relax() {
    std::hint::spin_loop();
}

fn runtime() -> Runtime {
    idle_polling(&mut tokio::runtime::Builder::new_current_thread()).enable_all().build().unwrap()
}

/// Keeps this thread on core `index`, if there are as many.
fn pin(index: usize) {
    let mut cores = CpuSet::new();
    cores.set(index);
    let _ = sched_setaffinity(None, &cores);
}

fn core(index: usize) -> usize {
    let allowed = sched_getaffinity(None).unwrap();
    let cores: Vec<_> = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect();
    cores[index % cores.len()]
}

/// The other process, as the one that measures has it, and the channel to it; ends on drop.
pub(crate) struct Peer {
    process: Child,
    input: Option<ChildStdin>,
    device: RdmaDevice,
    channel: Channel,
    runtime: Runtime,
}

impl Peer {
    pub(crate) fn start(role: Role, length: u64) -> Self {
        let name = ROLES.iter().find(|(known, _)| *known == role).unwrap().1;
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args([ARGUMENT, name, &length.to_string(), &all_cores(1).to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        pin(all_cores(0));
        let runtime = runtime();
        let (device, channel) = runtime.block_on(async {
            let device = RdmaDevice::builder().without_listener().unwrap();
            let channel = device.channel(line.trim(), 0).await.unwrap();
            (device, channel)
        });
        Self { process, input, device, channel, runtime }
    }

    pub(crate) fn channel(&self) -> &Channel {
        &self.channel
    }

    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// A region of this process', used before.
    pub(crate) fn region(&self, length: u64) -> MemRegion {
        let mut region = self.device.allocate(length as usize).unwrap();
        region.fill(1);
        region
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.process.wait();
    }
}

/// Core `index` of those that there were before anybody was pinned.
fn all_cores(index: usize) -> usize {
    static CORES: std::sync::OnceLock<[usize; 2]> = std::sync::OnceLock::new();
    CORES.get_or_init(|| [core(0), core(1)])[index]
}

/// The other process.
pub(crate) fn run(arguments: &[String]) {
    let [role, length, core] = arguments else { panic!("peer ROLE LENGTH CORE, not {arguments:?}") };
    let role = ROLES.iter().find(|(_, name)| name == role).expect("a role").0;
    let length: u64 = length.parse().expect("a length");
    pin(core.parse().expect("a core"));
    let stop = Arc::new(AtomicBool::new(false));
    let ended = Arc::new(Notify::new());
    let (stopping, ending) = (Arc::clone(&stop), Arc::clone(&ended));
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        stopping.store(true, Ordering::Relaxed);
        ending.notify_one();
    });
    runtime().block_on(async {
        tokio::select! {
            () = serve(role, length, &stop) => {}
            () = ended.notified() => {}
        }
    });
}

async fn serve(role: Role, length: u64, stop: &AtomicBool) {
    let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
    let mut output = std::io::stdout();
    let mut ready = || writeln!(output, "{}", device.endpoint()).unwrap();
    let running = || !stop.load(Ordering::Relaxed);
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
        Role::StaticAsync => {
            let mut receiver = device.static_receiver("slot", &bytes(length), 1).unwrap();
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
            let _region = device
                .export("region", device.allocate(length as usize).unwrap(), Rights::READ_WRITE)
                .unwrap();
            ready();
            std::future::pending::<()>().await;
        }
    }
}
