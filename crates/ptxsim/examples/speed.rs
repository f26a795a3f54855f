//! Nanoseconds per warp instruction, by kind: `cargo run -p ptxsim --example speed`.

use std::time::{Duration, Instant};

use ptxsim::{Launch, Memory, Module};

const ROUNDS: u32 = 20_000;
const REPEATS: u32 = 32;

/// A loop of `ROUNDS` rounds around `REPEATS` copies of `body`; words of shared memory at `%r2`, of a buffer at `%rd2`.
fn kernel(body: &str) -> String {
    let body = body.repeat(REPEATS as usize);
    format!(
        ".version 8.4\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 dynamic[];\n.visible .entry k(.param .u64 k_param_0)\n{{\n\
         .reg .pred %p<4>;\n.reg .b32 %r<40>;\n.reg .b64 %rd<20>;\nld.param.u64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 4;\n\
         mul.wide.u32 %rd3, %r1, 16;\nadd.s64 %rd2, %rd1, %rd3;\nmul.wide.u32 %rd4, %r1, 4;\nadd.s64 %rd5, %rd1, %rd4;\n\
         st.shared.v4.b32 [%r2], {{%r1, %r1, %r1, %r1}};\nbar.sync 0;\nmov.b32 %r30, 0;\nmov.b32 %r10, 0f3F800000;\nmov.b32 %r11, 0f3F7F3F80;\nmov.b32 %r12, 0f00000000;\nmov.b32 %r13, 0;\nshl.b32 %r14, %r1, 2;\n\
         $loop:\n{body}add.s32 %r30, %r30, 1;\nsetp.lt.u32 %p1, %r30, {ROUNDS};\n@%p1 bra $loop;\nret;\n}}\n"
    )
}

/// The time that this process has run, where the system says so: other processes on a busy machine do not count.
fn clock(start: Instant) -> Duration {
    let on_cpu = std::fs::read_to_string("/proc/self/schedstat").ok();
    let nanoseconds = on_cpu.and_then(|text| text.split(' ').next()?.parse().ok());
    nanoseconds.map_or_else(|| start.elapsed(), Duration::from_nanos)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let kinds = [
        ("add.s32", "add.s32 %r3, %r1, %r3;\n"),
        ("mad.lo.s32", "mad.lo.s32 %r3, %r1, %r2, %r3;\n"),
        ("lop3.b32", "lop3.b32 %r3, %r1, %r2, %r3, 0xea;\n"),
        ("add.s64", "add.s64 %rd6, %rd4, %rd6;\n"),
        ("mul.wide.u32", "mul.wide.u32 %rd6, %r1, 4;\n"),
        ("add.f32", "add.f32 %r12, %r10, %r12;\n"),
        ("fma.rn.f32", "fma.rn.f32 %r12, %r10, %r11, %r12;\n"),
        ("setp + selp", "setp.lt.s32 %p2, %r1, %r2;\nselp.b32 %r3, %r1, %r2, %p2;\n"),
        ("guarded add", "@%p2 add.s32 %r3, %r1, %r3;\n"),
        ("cvt.rn.bf16x2.f32", "cvt.rn.bf16x2.f32 %r3, %r10, %r11;\n"),
        ("fma.rn.bf16x2", "fma.rn.bf16x2 %r3, %r10, %r11, %r12;\n"),
        ("ex2.approx", "ex2.approx.ftz.f32 %r3, %r11;\n"),
        ("shfl.bfly", "shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1;\n"),
        ("ld.global.u32", "ld.global.u32 %r3, [%rd5];\n"),
        ("ld.global.v4", "ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%rd2];\n"),
        ("st.global.u32", "st.global.u32 [%rd5], %r1;\n"),
        ("ld.shared.u32", "ld.shared.u32 %r3, [%r14];\n"),
        ("ld.shared.v4", "ld.shared.v4.u32 {%r3, %r4, %r5, %r6}, [%r2];\n"),
        ("st.shared.u32", "st.shared.u32 [%r14], %r1;\n"),
        ("st.shared.u32 4-way", "st.shared.u32 [%r2], %r1;\n"),
        ("ldmatrix.x4", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3, %r4, %r5, %r6}, [%r2];\n"),
        (
            "mma.m16n8k16",
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r20,%r21,%r22,%r23}, {%r13,%r13,%r13,%r13}, {%r13,%r13}, {%r20,%r21,%r22,%r23};\n",
        ),
    ];
    let start = Instant::now();
    for (name, body) in kinds {
        let module = Module::parse(&kernel(body))?;
        let mut memory = Memory::new(1 << 16);
        let buffer = memory.allocate(4096).ok_or("no memory")?;
        let kernel = module.kernel("k").ok_or("no kernel")?;
        let params = buffer.to_le_bytes();
        let launch = Launch { kernel, grid: [1, 1, 1], block: [32, 1, 1], dynamic_shared: 4096, params: &params };
        let begun = clock(start);
        let report = launch.run(&mut memory)?;
        let nanoseconds = (clock(start) - begun).as_nanos() as f64 / report.warp_instructions as f64;
        println!("{name:20} {nanoseconds:7.1} ns");
    }
    Ok(())
}
