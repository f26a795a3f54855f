//! What the host grants this process: CPUs and memory, as affinity masks, control groups and the kernel say.
//!
//! A container sees the host's processors and memory, but may use only its quota; threads beyond the quota make a
//! machine slower, memory beyond the limit gets the process killed.

use std::{collections::BTreeSet, fs};

use crate::affinity::{self, CpuSet};

/// How many threads are worth starting, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Threads {
    /// The smallest of the bounds below, at least 1.
    pub count: usize,
    /// CPUs in the process's affinity mask.
    pub affinity: usize,
    /// Control group quota in CPUs, rounded up; `None` without one.
    pub quota: Option<usize>,
    /// NUMA nodes among the CPUs of the mask, at least 1.
    pub nodes: usize,
    /// Physical cores among the CPUs of the mask on one node, the one that has most of them.
    pub cores: usize,
}

/// The number of threads that this process should compute with.
pub fn available_threads() -> Threads {
    let cpus = affinity::of_process().cpus();
    let quota = quota(&Groups::of_process(), &read_file);
    let (nodes, node) = (nodes(&cpus, &read_file).len(), largest_node(&cpus, &read_file));
    let cores = physical_cores(&node, &read_file);
    let affinity = cpus.len().max(1);
    let count = affinity.min(cores).min(quota.unwrap_or(affinity)).max(1);
    Threads { count, affinity, quota, nodes, cores }
}

/// The CPUs of the mask that those threads stay on: all, or those of one NUMA node, since another socket's memory is read
/// much more slowly.
pub(crate) fn cpus_of_one_node() -> CpuSet {
    CpuSet::of_cpus(&largest_node(&affinity::of_process().cpus(), &read_file))
}

/// Bytes of memory that this process may use: the host's, or the control group's limit if that is lower.
///
/// `usize::MAX` where neither can be read.
pub fn memory_limit() -> usize {
    let total = read_file("/proc/meminfo").and_then(|text| memory_total(&text));
    let limit = group_memory(&Groups::of_process(), &read_file);
    total.unwrap_or(usize::MAX).min(limit.unwrap_or(usize::MAX))
}

/// Bytes of this process that are in memory now; `None` where the system does not say.
pub fn resident_bytes() -> Option<usize> {
    let pages = resident_pages(&read_file("/proc/self/statm")?)?;
    pages.checked_mul(page_size()?)
}

fn read_file(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Where this process stands in each control group hierarchy that bounds it: the mount point and the path below it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Groups {
    unified: Option<(String, String)>,
    cpu: Option<(String, String)>,
    memory: Option<(String, String)>,
}

impl Groups {
    fn of_process() -> Groups {
        let paths = read_file("/proc/self/cgroup").unwrap_or_default();
        let mounts = read_file("/proc/self/mountinfo").unwrap_or_default();
        Groups::parse(&paths, &mounts)
    }

    /// Reads `/proc/self/cgroup` (`id:controllers:path`) and `/proc/self/mountinfo`.
    fn parse(paths: &str, mounts: &str) -> Groups {
        let path = |controller: &str| {
            paths.lines().find_map(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                let (controllers, path) = (fields.next()?, fields.next()?);
                controllers.split(',').any(|name| name == controller).then(|| path.to_owned())
            })
        };
        // Fields before " - ": id, parent, device, root, mount point, ...; after it: type, source, options.
        let mount = |kind: &str, controller: &str| {
            mounts.lines().find_map(|line| {
                let (left, right) = line.split_once(" - ")?;
                let mut right = right.split(' ');
                let found = right.next()? == kind
                    && (controller.is_empty() || right.nth(1)?.split(',').any(|option| option == controller));
                found.then(|| left.split(' ').nth(4).map(str::to_owned))?
            })
        };
        Groups {
            unified: mount("cgroup2", "").zip(path("")),
            cpu: mount("cgroup", "cpu").zip(path("cpu")),
            memory: mount("cgroup", "memory").zip(path("memory")),
        }
    }
}

/// The directories of a group and its ancestors. A container that sees only its own group has it at the mount point.
fn ancestors((mount, path): &(String, String)) -> Vec<String> {
    let mut directories = Vec::new();
    let mut rest = path.trim_end_matches('/');
    while !rest.is_empty() {
        directories.push(format!("{mount}{rest}"));
        rest = rest.rfind('/').map_or("", |slash| &rest[..slash]);
    }
    directories.push(mount.clone());
    directories
}

type Read<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The tightest CPU quota over the groups of this process, rounded up.
fn quota(groups: &Groups, read: Read<'_>) -> Option<usize> {
    let unified = groups.unified.iter().flat_map(ancestors).filter_map(|directory| {
        let text = read(&format!("{directory}/cpu.max"))?;
        let (quota, period) = text.trim().split_once(' ')?;
        cpus_of_quota(quota, period)
    });
    let separate = groups.cpu.iter().flat_map(ancestors).filter_map(|directory| {
        let quota = read(&format!("{directory}/cpu.cfs_quota_us"))?;
        cpus_of_quota(&quota, &read(&format!("{directory}/cpu.cfs_period_us"))?)
    });
    unified.chain(separate).min()
}

/// `None` for `max`, -1 and anything that is no quota.
fn cpus_of_quota(quota: &str, period: &str) -> Option<usize> {
    let (quota, period): (usize, usize) = (quota.trim().parse().ok()?, period.trim().parse().ok()?);
    (quota > 0 && period > 0).then(|| quota.div_ceil(period))
}

/// The tightest memory limit over the groups of this process.
fn group_memory(groups: &Groups, read: Read<'_>) -> Option<usize> {
    let limit = |directory: String, file: &str| read(&format!("{directory}/{file}"))?.trim().parse::<usize>().ok();
    let unified = groups.unified.iter().flat_map(ancestors).filter_map(|d| limit(d, "memory.max"));
    let separate = groups.memory.iter().flat_map(ancestors).filter_map(|d| limit(d, "memory.limit_in_bytes"));
    unified.chain(separate).min()
}

/// `MemTotal` of `/proc/meminfo` in bytes.
fn memory_total(text: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// The second number of `/proc/self/statm`.
fn resident_pages(text: &str) -> Option<usize> {
    text.split_whitespace().nth(1)?.parse().ok()
}

/// Distinct cores among `cpus`. A CPU whose siblings are unknown counts as a core.
fn physical_cores(cpus: &[usize], read: Read<'_>) -> usize {
    let core = |cpu: usize| {
        let text = read(&format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))?;
        cpu_list(&text)?.into_iter().min()
    };
    cpus.iter().map(|&cpu| core(cpu).unwrap_or(cpu)).collect::<BTreeSet<usize>>().len().max(1)
}

/// Memory no further than this is that of the same socket, which some machines divide into several nodes; a node's own is
/// at 10, another socket's at 20 and more.
const NEAR: usize = 15;

/// The CPUs of each NUMA node that has some of them, the nodes of one socket together; one node where the system does not
/// say.
fn nodes(cpus: &[usize], read: Read<'_>) -> Vec<Vec<usize>> {
    let listed = |path: &str| read(path).and_then(|text| cpu_list(&text)).unwrap_or_default();
    let online = listed("/sys/devices/system/node/online");
    let is_near = |node: usize, index: usize| {
        let distances = read(&format!("/sys/devices/system/node/node{node}/distance")).unwrap_or_default();
        distances.split_whitespace().nth(index).is_some_and(|far| far.parse().is_ok_and(|far: usize| far <= NEAR))
    };
    // The first node of a socket, by its place in `online`, and all CPUs there.
    let mut sockets: Vec<(usize, Vec<usize>)> = Vec::new();
    for (index, &node) in online.iter().enumerate() {
        let listed = listed(&format!("/sys/devices/system/node/node{node}/cpulist"));
        let members = cpus.iter().copied().filter(|cpu| listed.contains(cpu));
        match sockets.iter_mut().find(|(first, _)| is_near(node, *first)) {
            Some((_, socket)) => socket.extend(members),
            None => sockets.push((index, members.collect())),
        }
    }
    let nodes: Vec<Vec<usize>> = sockets.into_iter().map(|(_, node)| node).filter(|node| !node.is_empty()).collect();
    if nodes.iter().map(Vec::len).sum::<usize>() == cpus.len() { nodes } else { vec![cpus.to_vec()] }
}

/// The node with the most cores, of several such nodes the first.
fn largest_node(cpus: &[usize], read: Read<'_>) -> Vec<usize> {
    let nodes = nodes(cpus, read).into_iter().rev();
    nodes.max_by_key(|node| physical_cores(node, read)).unwrap_or_default()
}

/// Reads the kernel's lists, as `0-3,8`.
fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        // No kernel has more CPUs; a corrupt list must not take all memory.
        if last >= 1 << 16 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(unix)]
fn page_size() -> Option<usize> {
    // SAFETY: reads a constant of the system.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()
}

#[cfg(not(unix))]
fn page_size() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const UNIFIED: &str = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
    const SEPARATE: &str = "30 25 0:27 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
                            31 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";

    fn files(entries: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        let map: HashMap<String, String> = entries.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        move |path| map.get(path).cloned()
    }

    #[test]
    fn a_unified_group_is_bounded_by_the_tightest_of_its_ancestors() {
        let groups = Groups::parse("0::/pod/box\n", UNIFIED);
        let read = files(&[
            ("/sys/fs/cgroup/pod/box/cpu.max", "max 100000\n"),
            ("/sys/fs/cgroup/pod/cpu.max", "150000 100000\n"),
            ("/sys/fs/cgroup/pod/box/memory.max", "max\n"),
            ("/sys/fs/cgroup/pod/memory.max", "1048576\n"),
        ]);
        assert_eq!(quota(&groups, &read), Some(2), "1.5 CPUs are worth two threads");
        assert_eq!(group_memory(&groups, &read), Some(1 << 20));
    }

    #[test]
    fn separate_hierarchies_are_read_where_they_are_mounted() {
        let groups = Groups::parse("5:memory:/job\n3:cpu,cpuacct:/job\n0::/\n", SEPARATE);
        let read = files(&[
            ("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "100000\n"),
            ("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "4096\n"),
        ]);
        assert_eq!(quota(&groups, &read), Some(1));
        assert_eq!(group_memory(&groups, &read), Some(4096));
    }

    #[test]
    fn a_container_that_sees_only_its_own_group_finds_it_at_the_mount_point() {
        let groups = Groups::parse("0::/docker/abc\n", UNIFIED);
        assert_eq!(quota(&groups, &files(&[("/sys/fs/cgroup/cpu.max", "50000 100000")])), Some(1));
    }

    #[test]
    fn no_quota_is_no_bound() {
        let groups = Groups::parse("3:cpu:/\n", SEPARATE);
        let read = files(&[
            ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
            ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
        ]);
        assert_eq!(quota(&groups, &read), None);
        assert_eq!(quota(&Groups::parse("", ""), &read), None);
        assert_eq!(group_memory(&Groups::parse("garbage\n::", "garbage - "), &read), None);
    }

    #[test]
    fn siblings_are_one_core() {
        let read = files(&[
            ("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,4\n"),
            ("/sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "1,5\n"),
            ("/sys/devices/system/cpu/cpu4/topology/thread_siblings_list", "0,4\n"),
        ]);
        assert_eq!(physical_cores(&[0, 1, 4], &read), 2);
        assert_eq!(physical_cores(&[7, 8], &read), 2, "unknown topology");
    }

    #[test]
    fn threads_stay_on_the_node_with_the_most_cores() {
        let read = files(&[
            ("/sys/devices/system/node/online", "0-1\n"),
            ("/sys/devices/system/node/node0/cpulist", "0-3,8-11\n"),
            ("/sys/devices/system/node/node1/cpulist", "4-7,12-15\n"),
        ]);
        assert_eq!(nodes(&[2, 3, 4, 5, 6], &read), [vec![2, 3], vec![4, 5, 6]]);
        assert_eq!(largest_node(&[2, 3, 4, 5, 6], &read), [4, 5, 6]);
        assert_eq!(largest_node(&[2, 3, 4, 5], &read), [2, 3], "of equal nodes the first");
        let divided = |path: &str| match path {
            "/sys/devices/system/node/node0/distance" => Some("10 12\n".to_owned()),
            "/sys/devices/system/node/node1/distance" => Some("12 10\n".to_owned()),
            _ => read(path),
        };
        assert_eq!(nodes(&[2, 3, 4, 5], &divided), [vec![2, 3, 4, 5]], "two nodes of one socket");
        assert_eq!(nodes(&[2, 16], &read), [vec![2, 16]], "a CPU that no node lists");
        assert_eq!(nodes(&[0, 1], &files(&[])), [vec![0, 1]], "a system that does not say");
    }

    #[test]
    fn lists_of_cpus_are_read_as_the_kernel_writes_them() {
        assert_eq!(cpu_list("0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(cpu_list("0-99999999999"), None);
        assert_eq!(cpu_list(""), None);
    }

    #[test]
    fn kernel_tables_are_read_in_their_units() {
        assert_eq!(memory_total("MemFree: 1 kB\nMemTotal:       16384 kB\n"), Some(16 << 20));
        assert_eq!(memory_total("MemTotal: many kB"), None);
        assert_eq!(resident_pages("100 42 3 4"), Some(42));
        assert_eq!(resident_pages(""), None);
    }

    #[test]
    fn the_chosen_count_is_within_every_bound() {
        let threads = available_threads();
        assert!(threads.count >= 1 && threads.count <= threads.affinity && threads.count <= threads.cores);
        assert!(threads.quota.is_none_or(|quota| threads.count <= quota));
        assert!(memory_limit() > 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn resident_memory_grows_with_what_is_touched() {
        let before = resident_bytes().unwrap();
        let held = vec![1u8; 64 << 20];
        assert!(resident_bytes().unwrap() >= before + held.len() / 2);
    }
}
