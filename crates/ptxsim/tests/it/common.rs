//! Small kernels written by hand, and what it takes to run them.

use ptxsim::{Fault, FaultKind, Launch, Memory, Module, Report};

/// A module with the kernel `k`: `num_params` 64-bit parameters, registers of every kind, `body`, `ret`.
pub fn ptx(num_params: usize, body: &str) -> String {
    let params: Vec<_> = (0..num_params).map(|index| format!(".param .u64 k_param_{index}")).collect();
    format!(
        "// hand-written\n.version 8.4\n.target sm_80\n.address_size 64\n\n.extern .shared .align 16 .b8 dynamic[];\n\
         .visible .entry k(\n\t{}\n)\n{{\n.reg .pred %p<20>;\n.reg .b16 %rs<40>;\n.reg .b32 %r<80>;\n.reg .b64 %rd<60>;\n\
         {body}\nret;\n}}\n",
        params.join(",\n\t")
    )
}

/// One block of `threads` threads of the kernel `k`.
pub fn run_ptx(
    memory: &mut Memory,
    text: &str,
    threads: u32,
    dynamic_shared: usize,
    params: &[u64],
) -> Result<Report, Fault> {
    let module = Module::parse(text).unwrap();
    let params: Vec<u8> = params.iter().flat_map(|param| param.to_le_bytes()).collect();
    let kernel = module.kernel("k").unwrap();
    Launch { kernel, grid: [1, 1, 1], block: [threads, 1, 1], dynamic_shared, params: &params }
        .run_with_budget(memory, 1_000_000)
}

/// The same for a body without further memory than `dynamic_shared` bytes of shared memory.
pub fn run_body(body: &str, threads: u32) -> Result<Report, Fault> {
    run_ptx(&mut Memory::new(1 << 20), &ptx(0, body), threads, 1024, &[])
}

/// The fault that a body must end in.
pub fn fault_of(body: &str, threads: u32) -> FaultKind {
    run_body(body, threads).expect_err("a fault").kind
}

pub fn upload(memory: &mut Memory, bytes: &[u8]) -> u64 {
    let address = memory.allocate(bytes.len()).unwrap();
    memory.write(address, bytes.len()).unwrap().copy_from_slice(bytes);
    address
}

pub fn upload_words(memory: &mut Memory, words: &[u32]) -> u64 {
    upload(memory, &words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())
}

pub fn upload_doubles(memory: &mut Memory, values: &[u64]) -> u64 {
    upload(memory, &values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
}

pub fn read_words(memory: &Memory, address: u64, count: usize) -> Vec<u32> {
    let bytes = memory.read(address, count * 4).unwrap();
    bytes.chunks_exact(4).map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

pub fn read_doubles(memory: &Memory, address: u64, count: usize) -> Vec<u64> {
    let bytes = memory.read(address, count * 8).unwrap();
    bytes.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// Runs `body` in one warp. Lane `l` finds word `l` of each input in `%r10`, `%r11`, `%r12`, double `l` of each in `%rd10` and so on, its
/// lane in `%r1`, and leaves its result in `%r20` and `%rd20`.
pub fn lanes(words: &[&[u32]], doubles: &[&[u64]], body: &str) -> (Vec<u32>, Vec<u64>) {
    let mut memory = Memory::new(1 << 20);
    let mut params = vec![memory.allocate(128).unwrap(), memory.allocate(256).unwrap()];
    let mut text = String::from(
        "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd1, %r1, 4;\nmul.wide.u32 %rd2, %r1, 8;\nmov.b32 %r20, 0;\nmov.b64 %rd20, 0;\n",
    );
    let inputs = words.iter().map(|values| (4, upload_words(&mut memory, &padded(values)))).collect::<Vec<_>>();
    let doubles = doubles.iter().map(|values| (8, upload_doubles(&mut memory, &padded(values)))).collect::<Vec<_>>();
    for (size, inputs) in [(4, inputs), (8, doubles)] {
        for (index, (_, address)) in inputs.into_iter().enumerate() {
            let (param, register) = (params.len(), 10 + index);
            params.push(address);
            text += &format!("ld.param.u64 %rd3, [k_param_{param}];\n");
            text += &match size {
                4 => format!("add.s64 %rd3, %rd3, %rd1;\nld.global.u32 %r{register}, [%rd3];\n"),
                _ => format!("add.s64 %rd3, %rd3, %rd2;\nld.global.u64 %rd{register}, [%rd3];\n"),
            };
        }
    }
    text += body;
    text += "\nld.param.u64 %rd3, [k_param_0];\nadd.s64 %rd3, %rd3, %rd1;\nst.global.u32 [%rd3], %r20;\n\
             ld.param.u64 %rd4, [k_param_1];\nadd.s64 %rd4, %rd4, %rd2;\nst.global.u64 [%rd4], %rd20;\n";
    let text = ptx(params.len(), &text);
    run_ptx(&mut memory, &text, 32, 0, &params).unwrap_or_else(|fault| panic!("{fault}"));
    (read_words(&memory, params[0], 32), read_doubles(&memory, params[1], 32))
}

fn padded<T: Copy + Default>(values: &[T]) -> Vec<T> {
    (0..32).map(|index| values.get(index).copied().unwrap_or_default()).collect()
}

/// Checks one instruction on words, `%r20` from `%r10`, `%r11`, `%r12`, against `expected`.
pub fn check_words<const N: usize>(instruction: &str, inputs: [&[u32]; N], expected: impl Fn([u32; N]) -> u32) {
    let (results, _) = lanes(&inputs, &[], instruction);
    for (lane, result) in results.into_iter().enumerate() {
        let operands = inputs.map(|input| input.get(lane).copied().unwrap_or_default());
        assert_eq!(result, expected(operands), "{instruction} of {operands:x?}: {result:#x}");
    }
}

/// The same on doubles.
pub fn check_doubles<const N: usize>(instruction: &str, inputs: [&[u64]; N], expected: impl Fn([u64; N]) -> u64) {
    let (_, results) = lanes(&[], &inputs, instruction);
    for (lane, result) in results.into_iter().enumerate() {
        let operands = inputs.map(|input| input.get(lane).copied().unwrap_or_default());
        assert_eq!(result, expected(operands), "{instruction} of {operands:x?}: {result:#x}");
    }
}

/// 32 words that are different in every call, from a small generator.
pub fn words(seed: u32) -> Vec<u32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    (0..32).map(|_| next()).collect()
}

pub fn doubles(seed: u32) -> Vec<u64> {
    words(seed).into_iter().zip(words(seed + 1000)).map(|(low, high)| u64::from(low) | u64::from(high) << 32).collect()
}

/// Values at which integers go wrong, in pairs.
pub fn edges() -> (Vec<u32>, Vec<u32>) {
    let values = [0u32, 1, 2, 31, 32, 33, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0x8000, 0x7fff, 0xffff, 5];
    let pairs = (0..32).map(|index| (values[index % 13], values[(index * 5 + index / 13) % 13]));
    pairs.unzip()
}

/// Numbers at which floats go wrong, in the lower lanes of 32 ordinary ones.
pub fn floats(seed: u32) -> Vec<u32> {
    let special =
        [0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-40, -1e-40, f32::MAX, f32::MIN_POSITIVE];
    let mut result: Vec<u32> = words(seed)
        .into_iter()
        .map(|bits| (f32::from_bits(bits & 0x007f_ffff | 0x3f80_0000) * 3.0 - 4.0).to_bits())
        .collect();
    for (index, value) in special.iter().enumerate() {
        result[(index * 7 + seed as usize) % 32] = value.to_bits();
    }
    result
}
