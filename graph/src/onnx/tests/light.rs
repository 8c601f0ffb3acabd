//! The real graphs. `graph/prepare-models` installs them.

use super::*;

/// Checks a model with its own batch of 1: loads agree, kernels give the values of the whole model, and
/// results are worth a comparison.
fn check(name: &str, dims: &[&str], lengths: &[u64]) {
    let Some(path) = light_file(name) else { return };
    let load = |seed| settings(seed, dims).load(&path).unwrap();
    let model = load(1);
    assert!(model.seeded() >= 10, "{} weights", model.seeded());
    assert!(model.topology().nodes().map(|(_, node)| node.work).sum::<u64>() > 100_000_000);
    check_kernels(&model, lengths);
    check_results(&model, load, 1);
}

#[test]
fn squeezenet_with_a_symbolic_batch() {
    check("squeezenet", &["data_0:0=N"], &[2, 1]);
}

#[test]
fn shufflenet() {
    check("shufflenet", &[], &[1]);
}

#[test]
#[ignore = "takes too long without optimisation"]
fn alexnet() {
    check("bvlc_alexnet", &["data_0:0=N"], &[3, 1]);
}

#[test]
#[ignore = "takes too long without optimisation"]
fn densenet() {
    check("densenet121", &[], &[1]);
}

#[test]
#[ignore = "takes too long without optimisation"]
fn inception_v1() {
    check("inception_v1", &["data_0:0=N"], &[1, 2]);
}

#[test]
#[ignore = "takes too long without optimisation"]
fn inception_v2() {
    check("inception_v2", &[], &[1]);
}

#[test]
#[ignore = "takes too long without optimisation"]
fn resnet() {
    check("resnet50", &["gpu_0/data_0:0=N"], &[2, 1]);
}

#[test]
#[ignore = "needs 4 GB of memory"]
fn vgg() {
    check("vgg19", &[], &[1]);
}

#[test]
#[ignore = "takes too long without optimisation"]
fn zfnet() {
    check("zfnet512", &[], &[1]);
}
