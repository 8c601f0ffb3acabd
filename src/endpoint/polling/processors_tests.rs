#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::process::Command;

use rustix::thread::sched_setaffinity;

use super::*;

/// The variable that gives a child its role.
const ROLE: &str = "TONIC_RDMA_PROCESSORS_TEST_ROLE";
/// The role of a child that may run on one CPU. Other roles are control groups.
const ONE_CPU: &str = "one CPU";

/// Returns the folders as text, those of version 1 with a `1` before them.
fn folders(mountinfo: &str, cgroups: &str) -> Vec<String> {
    let text = |(hierarchy, folder): &(Hierarchy, PathBuf)| {
        let version = if *hierarchy == Hierarchy::One { 1 } else { 2 };
        // Without a slash at the end.
        format!("{version} {}", folder.components().collect::<PathBuf>().display())
    };
    groups(mountinfo, cgroups).iter().map(text).collect()
}

#[test]
fn a_service_of_systemd_has_the_limits_of_its_slices() {
    let mounts = "\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro
28 22 0:25 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
";
    let found = folders(mounts, "0::/system.slice/system-web.slice/web.service\n");
    let below =
        ["/system.slice/system-web.slice/web.service", "/system.slice/system-web.slice", "/system.slice", ""];
    assert_eq!(found, below.map(|path| format!("2 /sys/fs/cgroup{path}")));
}

#[test]
fn a_container_has_its_group_at_the_root_of_the_mount() {
    // Docker, version 2, in a namespace of its own.
    let mounts =
        "1546 1545 0:30 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate\n";
    assert_eq!(folders(mounts, "0::/\n"), ["2 /sys/fs/cgroup"]);
    // Docker, version 1, without one: the mount's root is the group.
    let id = "4ac6a4aa3dbd8a3d2f7f2a2e1cd5a2e60ae1e7f2f0ebd9e5a0f7b3a1c0d9e8f7";
    let mounts = format!(
        "\
756 755 0:30 /docker/{id} /sys/fs/cgroup/systemd ro,nosuid,nodev,noexec,relatime master:11 - cgroup cgroup rw,xattr,name=systemd
759 755 0:34 /docker/{id} /sys/fs/cgroup/cpu,cpuacct ro,nosuid,nodev,noexec,relatime master:16 - cgroup cgroup rw,cpu,cpuacct
760 755 0:35 /docker/{id} /sys/fs/cgroup/cpuset ro,nosuid,nodev,noexec,relatime master:17 - cgroup cgroup rw,cpuset
"
    );
    let cgroups = format!("6:cpuset:/docker/{id}\n4:cpu,cpuacct:/docker/{id}\n1:name=systemd:/docker/{id}\n");
    assert_eq!(folders(&mounts, &cgroups), ["1 /sys/fs/cgroup/cpu,cpuacct"]);
}

#[test]
fn a_pod_has_the_limits_of_its_container_and_of_the_pod() {
    let path =
        "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1a2b.slice/cri-containerd-9f8e.scope";
    // Version 2 with the host's mount.
    let mounts = "40 30 0:26 / /sys/fs/cgroup ro,relatime - cgroup2 cgroup rw\n";
    let found = folders(mounts, &format!("0::{path}\n"));
    assert_eq!((found.len(), &*found[4]), (5, "2 /sys/fs/cgroup"));
    assert_eq!(found[0], format!("2 /sys/fs/cgroup{path}"));
    // Version 1, with the pod's group mounted.
    let pod = "/kubepods/burstable/pod1a2b";
    let mounts = format!("41 30 0:27 {pod} /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n");
    let found = folders(&mounts, &format!("5:cpu:{pod}/9f8e\n"));
    assert_eq!(found, ["1 /sys/fs/cgroup/cpu/9f8e", "1 /sys/fs/cgroup/cpu"]);
}

#[test]
fn a_hybrid_system_has_both_hierarchies() {
    let mounts = "\
31 25 0:27 / /sys/fs/cgroup/unified rw,nosuid,nodev,noexec,relatime shared:10 - cgroup2 cgroup2 rw
35 25 0:31 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid,nodev,noexec,relatime shared:15 - cgroup cgroup rw,cpu,cpuacct
";
    let cgroups = "3:cpu,cpuacct:/user.slice\n1:name=systemd:/user.slice/a.scope\n0::/user.slice/a.scope\n";
    let found = folders(mounts, cgroups);
    assert_eq!(found[..2], ["1 /sys/fs/cgroup/cpu,cpuacct/user.slice", "1 /sys/fs/cgroup/cpu,cpuacct"]);
    assert_eq!(found[2], "2 /sys/fs/cgroup/unified/user.slice/a.scope");
}

#[test]
fn a_group_that_is_not_visible_has_the_limits_of_what_is_mounted() {
    // The process was moved out of its namespace's root.
    let mounts = "40 30 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
    assert_eq!(folders(mounts, "0::/../other\n"), ["2 /sys/fs/cgroup"]);
    // The mount is of another namespace.
    let mounts = "40 30 0:26 /../../.. /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
    assert_eq!(folders(mounts, "0::/\n"), ["2 /sys/fs/cgroup"]);
    // Of two mounts, the one counts that shows the group.
    let mounts = "40 30 0:26 /a /mnt/a ro - cgroup2 cgroup rw\n41 30 0:26 /b /mnt/b ro - cgroup2 cgroup rw\n";
    assert_eq!(folders(mounts, "0::/b/c\n"), ["2 /mnt/b/c", "2 /mnt/b"]);
}

#[test]
fn malformed_files_are_no_groups() {
    for mounts in
        ["", "\n", "40 30 0:26", "40 30 0:26 / - cgroup2", "40 30 0:26 / /a ro cgroup2 cgroup rw", " - - -"]
    {
        assert_eq!(folders(mounts, "0::/\n"), [""; 0], "{mounts:?}");
    }
    for cgroups in ["", "0", "0:", "0:cpu", "::", "x:y:z"] {
        let found = folders("40 30 0:26 / /a ro - cgroup cgroup rw,cpu\n", cgroups);
        assert_eq!(found, [""; 0], "{cgroups:?}");
    }
}

#[test]
fn a_limit_is_a_quota_of_a_period() {
    let two = |text: &str| Hierarchy::Two.limit(|name| (name == "cpu.max").then(|| text.to_owned()));
    for (text, limit) in [
        ("max 100000\n", None),
        ("50000 100000\n", Some(500)),
        ("150000 100000\n", Some(1500)),
        ("1000 1000000\n", Some(1)),
        ("1000 10000000\n", Some(1)),
        ("18446744073709551615 1\n", Some(u32::MAX)),
        ("", None),
        ("50000", None),
        ("50000 0", None),
        ("-5 100000", None),
        ("half 100000", None),
    ] {
        assert_eq!(two(text), limit, "{text:?}");
    }
    let one = |quota: &str, period: &str| {
        Hierarchy::One.limit(|name| match name {
            "cpu.cfs_quota_us" => Some(quota.to_owned()),
            "cpu.cfs_period_us" => Some(period.to_owned()),
            _ => None,
        })
    };
    assert_eq!(one("-1\n", "100000\n"), None);
    assert_eq!(one("200000\n", "100000\n"), Some(2000));
    assert_eq!(one("25000\n", "50000\n"), Some(500));
    assert_eq!(Hierarchy::One.limit(|_| None), None);
}

#[test]
fn hardware_threads_of_one_core_count_once() {
    let pairs = |cpu| format!("{},{}\n", cpu % 4, cpu % 4 + 4);
    assert_eq!(cores(&[0, 1, 2, 3, 4, 5, 6, 7], pairs), 4);
    assert_eq!(cores(&[4, 5], pairs), 2, "the others of these cores are not allowed");
    assert_eq!(cores(&[0, 1, 2, 3], |cpu| if cpu < 2 { "0-1\n" } else { "2-3\n" }.to_owned()), 2);
    for unknown in ["", "x", "3-", "0-99999999"] {
        assert_eq!(cores(&[0, 1], |_| unknown.to_owned()), 2, "{unknown:?}");
    }
}

#[test]
fn the_smaller_of_mask_and_limit_is_usable() {
    let usable = |cpus, limit| Processors { cpus, cores: 1, limit }.usable();
    assert_eq!([usable(2, None), usable(2, Some(500)), usable(1, Some(1500))], [2000, 500, 1000]);
    let is_limited = |limit| Processors { cpus: 1, cores: 1, limit }.is_limited();
    assert_eq!([None, Some(1999), Some(2000)].map(is_limited), [false, true, false]);
}

/// Makes a command that runs the next test in a process of its own, with a role.
fn child(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let name = "endpoint::polling::processors::tests::role_of_a_child";
    command.args(["--exact", name, "--test-threads=1"]).env(ROLE, role);
    command
}

#[test]
fn role_of_a_child() {
    match std::env::var(ROLE).as_deref() {
        Ok(ONE_CPU) => {
            let one = Processors::current();
            assert_eq!((one.cpus, one.cores, Processors::current()), (1, 1, one));
        }
        Ok(group) => has_half_a_cpu_and_then_more(Path::new(group)),
        Err(_) => {}
    }
}

#[test]
fn the_mask_of_the_process_counts_and_not_that_of_a_pinned_thread() {
    let before = allowed();
    // A process inherits the mask of the thread that starts it.
    let pinned = std::thread::spawn(|| {
        let mut one = CpuSet::new();
        one.set(allowed()[0]);
        sched_setaffinity(None, &one).unwrap();
        (allowed(), child(ONE_CPU).status().unwrap())
    });
    let (after, status) = pinned.join().unwrap();
    assert!(status.success());
    assert_eq!(after, before);
}

fn set_limit(hierarchy: Hierarchy, group: &Path, quota: &str) -> bool {
    let file = if hierarchy == Hierarchy::One { "cpu.cfs_quota_us" } else { "cpu.max" };
    std::fs::write(group.join(file), quota).is_ok()
}

/// A control group for one process, removed when this is dropped.
struct Group(PathBuf);

impl Group {
    /// Makes a group below one of this process's.
    fn new() -> Option<Self> {
        Reader::new().groups.into_iter().find_map(|(hierarchy, above)| {
            let folder = above.join(format!("tonic-rdma-test-{}", std::process::id()));
            std::fs::create_dir(&folder).ok()?;
            let group = Self(folder);
            set_limit(hierarchy, &group.0, "50000").then_some(group)
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Joins a group that allows half a CPU.
fn has_half_a_cpu_and_then_more(folder: &Path) {
    std::fs::write(folder.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    assert_eq!((Processors::current().limit, Processors::current().usable()), (Some(500), 500));
    let is_one = folder.join("cpu.cfs_quota_us").exists();
    let hierarchy = if is_one { Hierarchy::One } else { Hierarchy::Two };
    let now = Instant::now();
    for (quota, seconds, limit) in [("50000", 0, 500), ("150000", 1, 500), ("150000", 6, 1500)] {
        assert!(set_limit(hierarchy, folder, quota));
        Processors::refresh(now + Duration::from_secs(seconds));
        assert_eq!(Processors::current().limit, Some(limit), "{seconds} s");
    }
}

#[test]
fn the_limit_of_a_real_group_is_found_and_read_again() {
    let Some(group) = Group::new() else {
        println!("skipped: a new control group with a CPU limit is not permitted here");
        return;
    };
    let status = child(group.0.to_str().unwrap()).status().unwrap();
    assert!(status.success());
}
